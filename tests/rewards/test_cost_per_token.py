"""What output, context and turns cost."""

import pytest
import torch
from torch import Tensor

from rlprims.rewards import cost_per_token
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record("rewards.cost_per_token", check_reward, matters={"output": 0.5, "context": 0.0, "turns": 0.5}),
]

IDS = torch.zeros(3, dtype=torch.int64)
MASK = torch.arange(8) < torch.tensor([[4], [8], [2]])


def cost(scores: list[float], ids: Tensor = IDS, **more: Tensor | float) -> list[float]:
    return cost_per_token(torch.tensor(scores, dtype=torch.float64), ids, MASK, **more).tolist()


def test_output_alone() -> None:
    """All right: the longest of the group pays ¼, the others their share of it."""
    assert cost([1, 1, 1]) == pytest.approx([-0.125, -0.25, -0.0625])


def test_the_price_is_the_share_that_is_right() -> None:
    assert cost([1, 0, 0]) == pytest.approx([-0.125 / 3, -0.25 / 3, -0.0625 / 3])
    assert cost([0, 0, 0]) == [0, 0, 0]


def test_context_and_turns() -> None:
    """Context 30, 10, 20 of 30; turns 1, 2, 1 of 2; tool output between two tokens is no turn and no output."""
    turns = torch.tensor([[0] * 8, [0] * 5 + [1] * 3, [0, 0, 7, 7, 7, 7, 7, 7]])
    got = cost([1, 1, 1], context_lengths=torch.tensor([30, 10, 20]), turn_ids=turns)
    assert got == pytest.approx([-0.125 - 0.1 - 0.05, -0.25 - 0.1 / 3 - 0.1, -0.0625 - 0.2 / 3 - 0.05])


def test_each_group_has_its_own_measure_and_price() -> None:
    assert cost([1, 1, 0], torch.tensor([0, 1, 1])) == pytest.approx([-0.25, -0.125, -0.03125])


def test_a_negative_mean_rewards_no_length() -> None:
    assert cost([-1, -1, 1]) == [0, 0, 0]


def test_the_numbers_of_prime_rl() -> None:
    """Its own test: rewards 1, 1, 0, 0 of 10 to 40 tokens, coef 2: r − 2 · ½ · length / 40, less the mean."""
    mask = torch.arange(40) < torch.tensor([[10], [20], [30], [40]])
    scores, ids = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    got = scores + cost_per_token(scores, ids, mask, output=2.0)
    assert got.tolist() == pytest.approx([0.75, 0.5, -0.75, -1.0])


def test_a_response_without_a_token_counts_as_wrong_and_costs_nothing() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    got = cost_per_token(torch.tensor([1.0, torch.nan]), torch.tensor([0, 0]), mask)
    assert got.tolist() == pytest.approx([-0.125, 0.0])


@pytest.mark.parametrize("name", ["output", "context", "turns"])
def test_a_negative_cost_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=-0.5"):
        cost([1, 1, 1], **{name: -0.5})
