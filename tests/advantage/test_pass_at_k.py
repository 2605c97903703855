"""The best against the second best."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.advantage import pass_at_k_training
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [
    Record("advantage.pass_at_k_training", check_advantage, matters={"normalize_std": True, "tolerance": 10.0}),
    Record(
        "advantage.pass_at_k_training", check_advantage, call={"normalize_std": True}, matters={"ddof": 0, "eps": 0.1}
    ),
]


def per_response(scores: list[float], ids: list[int] | None = None, **kwargs: object) -> list[float]:
    rewards, mask = torch.tensor(scores, dtype=torch.float64)[:, None], torch.ones(len(scores), 1, dtype=torch.bool)
    return pass_at_k_training(rewards, torch.tensor(ids or [0] * len(scores)), mask, **kwargs)[:, 0].tolist()


def test_the_lead_over_the_second() -> None:
    """verl 0.9.1, ``grpo_passk`` without the deviation."""
    assert per_response([0.25, 1, 0.5]) == [0, 0.5, 0]


def test_the_lead_in_deviations() -> None:
    """verl 0.9.1, ``grpo_passk`` as it is: ε = 1e-6."""
    assert per_response([1, 0, 0, 0], normalize_std=True) == pytest.approx([1 / 0.500001, 0, 0, 0], abs=1e-12)
    assert per_response([1, 0], normalize_std=True) == pytest.approx([1 / (0.5**0.5 + 1e-6), 0], abs=1e-12)


def test_equal_best_responses_give_zero() -> None:
    assert per_response([1, 1, 0]) == [0, 0, 0]
    assert per_response([0.1] * 7, normalize_std=True, eps=0.0) == [0] * 7


def test_a_group_of_one_gives_zero() -> None:
    """verl 0.9.1 raises."""
    assert per_response([3, 1, 0], [1, 0, 0]) == [0, 1, 0]


def test_a_row_left_out_is_not_compared() -> None:
    assert per_response([3, 1, 0], valid_rows=torch.tensor([False, True, True])) == [0, 1, 0]


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=6))
def test_pass_at_k_advantage_of_all_samples_is_the_largest_less_the_largest_of_the_others(scores: list[int]) -> None:
    want = [max(scores) - max(itertools.chain(scores[:i], scores[i + 1 :])) for i in range(len(scores))]
    assert per_response([float(s) for s in scores]) == want
