"""Tokens cost more where the prompt is easy."""

import pytest
import torch

from rlprims.rewards import solve_rate_length
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record(
        "rewards.solve_rate_length",
        check_reward,
        call={"max_length": 6},
        matters={"max_length": 5, "coefficient": 0.1, "correct_above": 0.0},
    ),
]


def mask_of(*lengths: int) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def ids(*labels: int) -> torch.Tensor:
    return torch.tensor(labels)


def test_half_solved() -> None:
    """prime-rl's linear penalty of coefficient 2 where its longest response, 40, is our max_length."""
    scores = torch.tensor([1.0, 1.0, 0.0, 0.0])
    got = solve_rate_length(scores, ids(0, 0, 0, 0), mask_of(10, 20, 30, 40), max_length=40, coefficient=2.0)
    assert got.tolist() == pytest.approx([-0.25, -0.5, -0.75, -1.0])


def test_easy_prompts_pay_most_and_unsolved_ones_as_if_one_were_solved() -> None:
    scores = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    got = solve_rate_length(scores, ids(0, 0, 1, 1, 2, 2), mask_of(*[8] * 6), max_length=8, coefficient=1.0)
    assert got.tolist() == pytest.approx([-1, -1, -0.5, -0.5, -0.5, -0.5])


def test_groups_may_differ_in_size() -> None:
    scores = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0])
    got = solve_rate_length(scores, ids(0, 0, 0, 0, 1), mask_of(*[8] * 5), max_length=16, coefficient=1.0)
    assert got.tolist() == pytest.approx([-0.125] * 4 + [-0.5])


def test_an_empty_response_costs_nothing_and_counts_as_wrong() -> None:
    got = solve_rate_length(torch.ones(2), ids(0, 0), mask_of(0, 4), max_length=4, coefficient=1.0)
    assert got.tolist() == [0, -0.5]


@pytest.mark.parametrize("wrong", [{"max_length": 0}, {"max_length": 4, "coefficient": -1.0}])
def test_values_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"max_length|coefficient"):
        solve_rate_length(torch.ones(1), ids(0), mask_of(1), **wrong)
