"""The baseline weighted by length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.advantage import grpo, opo
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [
    Record("advantage.opo", check_advantage, matters={"singleton": "raw"}),
]


def ragged(scores: list[float], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.arange(max([1, *lengths])) < torch.tensor(lengths)[:, None]
    rewards = torch.full(mask.shape, 9.0, dtype=torch.float64)
    rewards[mask] = 0.0
    rewards[:, 0] = torch.where(mask[:, 0], torch.tensor(scores, dtype=torch.float64), 9.0)
    return rewards, mask


def one_group(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int64)


def test_three_lengths() -> None:
    """verl 0.9.1: b = (1·2 + 2·1 + 3·0) / 6."""
    rewards, mask = ragged([2, 1, 0], [1, 2, 3])
    got = opo(rewards, one_group(3), mask)
    assert got[:, 0].tolist() == pytest.approx([4 / 3, 1 / 3, -2 / 3])
    assert (got[~mask] == 0).all()


def test_equal_lengths_are_the_mean() -> None:
    rewards, mask = ragged([1, 0, 0, 4], [2, 2, 2, 2])
    ids = torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(opo(rewards, ids, mask), grpo(rewards, ids, mask, normalize_std=False))


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 6)), min_size=2, max_size=8))
def test_the_advantages_of_all_tokens_sum_to_zero(responses: list[tuple[float, int]]) -> None:
    rewards, mask = ragged([s for s, _ in responses], [n for _, n in responses])
    got = opo(rewards, one_group(len(responses)), mask)
    assert got.isfinite().all()
    assert got.sum().abs() < 1e-9


def test_equal_rewards_give_zero() -> None:
    rewards, mask = ragged([1000.1] * 3, [1, 4, 2])
    assert (opo(rewards.float(), one_group(3), mask) == 0).all()


def test_a_group_of_one_and_a_group_without_tokens() -> None:
    """verl 0.9.1 answers 3, as under "raw", and NaN."""
    rewards, mask = ragged([3, 1, 1], [2, 0, 0])
    assert (opo(rewards, torch.tensor([0, 1, 1]), mask) == 0).all()
    got = opo(rewards, torch.tensor([0, 1, 1]), mask, singleton="raw")
    assert got.tolist() == [[3, 3], [0, 0], [0, 0]]


def test_rows_may_be_left_out_of_the_baseline() -> None:
    rewards, mask = ragged([1, 3, 100], [1, 1, 1])
    got = opo(rewards, one_group(3), mask, valid_rows=torch.tensor([True, True, False]))
    assert got[:, 0].tolist() == [-1, 1, 0]
