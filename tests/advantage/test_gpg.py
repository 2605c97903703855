"""Group policy gradient: the rescaling."""

import pytest
import torch

from rlprims.advantage import gpg, grpo
from rlprims.testing import check_advantage
from tests.records import Record


def beside_another(x: torch.Tensor) -> torch.Tensor:
    """The all_reduce of two ranks, when the other has one informative response."""
    return x + 1


RECORDS = [
    Record(
        "advantage.gpg",
        check_advantage,
        matters={"informative": "nonzero_reward", "singleton": "raw", "tolerance": 10.0, "all_reduce": beside_another},
        exempt={"batches may be merged": "the share that teaches is that of the whole batch"},
    ),
]

REWARDS = torch.tensor([[1.0], [0.0], [1.0], [1.0]], dtype=torch.float64)
MASK = torch.ones(4, 1, dtype=torch.bool)
IDS = torch.tensor([0, 0, 1, 1])


def test_gpg_where_half_of_the_batch_has_advantages() -> None:
    assert gpg(REWARDS, IDS, MASK)[:, 0].tolist() == [1, -1, 0, 0]


def test_nonzero_rewards_are_counted() -> None:
    """verl 0.9.1: α = 4/3."""
    got = gpg(REWARDS, IDS, MASK, informative="nonzero_reward")[:, 0]
    assert got.tolist() == pytest.approx([2 / 3, -2 / 3, 0, 0])


def test_rewards_of_both_signs_are_all_nonzero() -> None:
    """verl 0.9.1: α = 1, so that its correction corrects nothing."""
    rewards = 2 * REWARDS - 1
    assert gpg(rewards, IDS, MASK, informative="nonzero_reward")[:, 0].tolist() == [1, -1, 0, 0]
    assert gpg(rewards, IDS, MASK)[:, 0].tolist() == [2, -2, 0, 0]


def test_a_mean_over_the_batch_does_not_shrink_with_dead_groups() -> None:
    live = gpg(REWARDS[:2], IDS[:2], MASK[:2])
    padded = gpg(REWARDS, IDS, MASK)
    assert padded.abs().mean() == live.abs().mean()


def test_if_every_group_has_advantages_it_is_dr_grpo() -> None:
    rewards = torch.tensor([[1.0], [0.0], [5.0], [2.0]])
    torch.testing.assert_close(gpg(rewards, IDS, MASK), grpo(rewards, IDS, MASK, normalize_std=False))


def test_if_none_does_it_is_zero() -> None:
    assert (gpg(torch.full((4, 1), 0.7), IDS, MASK) == 0).all()
    assert (gpg(REWARDS, torch.arange(4), MASK) == 0).all()


def test_a_group_of_one_may_keep_its_reward() -> None:
    """verl 0.9.1: three of three rewards are not 0, α = 1; ours counts the two of the other group, α = 3/2."""
    rewards, ids, mask = torch.tensor([[3.0], [1.0], [2.0]]), torch.tensor([1, 0, 0]), MASK[:3]
    got = gpg(rewards, ids, mask, informative="nonzero_reward", singleton="raw")[:, 0]
    assert got.tolist() == [3, -0.5, 0.5]
    assert gpg(rewards, ids, mask, singleton="raw")[:, 0].tolist() == [4.5, -0.75, 0.75]
    assert gpg(rewards, ids, mask)[:, 0].tolist() == [0, -0.75, 0.75]


def test_two_ranks_agree_with_one() -> None:
    """The other rank holds four rows of which four teach."""
    other = torch.tensor([4.0, 4.0])
    got = gpg(REWARDS, IDS, MASK, all_reduce=lambda x: x + other)[:, 0]
    assert got.tolist() == pytest.approx([2 / 3, -2 / 3, 0, 0])
