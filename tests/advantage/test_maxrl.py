"""The centred reward over the mean reward."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.advantage import maxrl
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [
    Record(
        "advantage.maxrl",
        check_advantage,
        matters={"eps": 0.1},
        exempt={"a shift of a group cancels": "divides by the mean, which the shift moves"},
    ),
]


def per_response(scores: list[float], **hyperparameters: float) -> list[float]:
    rewards, mask = torch.tensor(scores, dtype=torch.float64)[:, None], torch.ones(len(scores), 1, dtype=torch.bool)
    return maxrl(rewards, torch.zeros(len(scores), dtype=torch.int64), mask, **hyperparameters)[:, 0].tolist()


def test_maxrl_of_one_right_of_four() -> None:
    """prime-rl 559b44772; SkyRL a9564572e has ε = 1e-6 in the mean."""
    assert per_response([1, 0, 0, 0], eps=0.0) == [3, -1, -1, -1]
    assert per_response([1, 0, 0, 0])[0] == pytest.approx(0.75 / 0.250001, abs=1e-12)


def test_three_rewards() -> None:
    assert per_response([2, 1, 0], eps=0.0) == [1, 0, -1]


def test_a_mean_that_is_not_positive_gives_zero() -> None:
    """SkyRL a9564572e turns the signs of the first round, and answers ±1e6 to the second."""
    assert per_response([-1, -1, -1, 1]) == [0] * 4
    assert per_response([-1, 1, -1, 1]) == [0] * 4
    assert per_response([0, 0, 0]) == [0] * 3


def test_equal_rewards_and_a_group_of_one_give_zero() -> None:
    assert per_response([0.7] * 8) == [0] * 8
    assert per_response([5.0]) == [0]


@given(st.lists(st.booleans(), min_size=2, max_size=16).filter(any))
def test_right_answers_weigh_one_over_p(right: list[bool]) -> None:
    got = per_response([float(x) for x in right], eps=0.0)
    p = sum(right) / len(right)
    assert got == pytest.approx([1 / p - 1 if x else -1 for x in right])
