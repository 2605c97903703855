"""Leave-one-out baselines."""

import pytest
import torch

from rlprims.advantage import grpo, rloo
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [
    Record("advantage.rloo", check_advantage),
]


def per_response(scores: list[float], ids: list[int], **kwargs: torch.Tensor) -> list[float]:
    rewards = torch.tensor(scores, dtype=torch.float64)[:, None]
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    return rloo(rewards, torch.tensor(ids), mask, **kwargs)[:, 0].tolist()


def test_rloo_of_one_right_of_four() -> None:
    assert per_response([1, 0, 0, 0], [0] * 4) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_of_two_it_is_the_difference() -> None:
    assert per_response([5, 3, 7, 7.5], [0, 0, 1, 1]) == [2, -2, -0.5, 0.5]


def test_a_group_of_one_has_no_baseline() -> None:
    assert per_response([5, 1, 2], [2, 0, 0]) == [0, -1, 1]


def test_rloo_is_the_centred_reward_times_n_over_n_minus_one() -> None:
    rewards = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask, ids = torch.ones(6, 3, dtype=torch.bool), torch.tensor([0, 1, 1, 0, 1, 0])
    torch.testing.assert_close(rloo(rewards, ids, mask), 1.5 * grpo(rewards, ids, mask, normalize_std=False))


def test_a_row_that_does_not_count_is_not_compared() -> None:
    valid = torch.tensor([True, True, False])
    assert per_response([1, 3, 10], [0] * 3, valid_rows=valid) == [-2, 2, 0]
