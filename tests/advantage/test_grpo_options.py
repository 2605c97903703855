"""GRPO with the deviation of the batch, and with the others' mean as baseline."""

import pytest
import torch

from rlprims.advantage import grpo, rloo

REWARDS = torch.tensor([[1.0], [0.0], [5.0], [3.0]], dtype=torch.float64)
MASK = torch.ones(4, 1, dtype=torch.bool)
IDS = torch.tensor([0, 0, 1, 1])


def test_the_deviation_of_raw_rewards() -> None:
    """TRL 1.16.0, ``scale_rewards="batch"``: σ² = 14.75 / 3, ε = 1e-4."""
    got = grpo(REWARDS, IDS, MASK, std_over="batch", eps=1e-4)[:, 0]
    want = [x / ((14.75 / 3) ** 0.5 + 1e-4) for x in (0.5, -0.5, 1, -1)]
    assert got.tolist() == pytest.approx(want, abs=1e-12)


def test_the_deviation_of_centred_rewards() -> None:
    """ms-swift's: σ² = 2.5 / 3."""
    got = grpo(REWARDS, IDS, MASK, std_over="batch_centred", eps=0.0)[:, 0]
    assert got.tolist() == pytest.approx([0.547723, -0.547723, 1.095445, -1.095445], abs=1e-6)


def test_grpo_over_raw_deviations_sees_the_distance_between_prompts() -> None:
    far = REWARDS + 100.0 * IDS[:, None]
    near, apart = (grpo(r, IDS, MASK, std_over="batch_centred") for r in (REWARDS, far))
    torch.testing.assert_close(near, apart, rtol=0, atol=1e-12)
    assert (grpo(far, IDS, MASK, std_over="batch").abs() < 0.05).all()


def test_a_group_of_equal_rewards_is_zero_beside_a_varied_one() -> None:
    rewards = torch.tensor([[0.1], [0.1], [5.0], [3.0]])
    for over in ("batch", "batch_centred"):
        got = grpo(rewards, IDS, MASK, std_over=over)[:, 0]
        assert got[:2].tolist() == [0, 0]
        assert got[2] == -got[3] > 0


def test_a_row_left_out_is_not_in_the_deviation() -> None:
    rewards, mask = torch.cat([REWARDS, torch.tensor([[1e6]])]), torch.ones(5, 1, dtype=torch.bool)
    valid = torch.tensor([True] * 4 + [False])
    ids = torch.tensor([0, 0, 1, 1, 1])
    for over in ("batch", "batch_centred"):
        got = grpo(rewards, ids, mask, valid_rows=valid, std_over=over)[:4]
        torch.testing.assert_close(got, grpo(REWARDS, IDS, MASK, std_over=over), rtol=0, atol=1e-12)


@pytest.mark.parametrize("over", ["batch", "batch_centred"])
def test_two_ranks_agree_with_one(over: str) -> None:
    """Both hold the same rows, so that a sum over ranks is twice what one says."""
    both = grpo(REWARDS.repeat(2, 1), torch.cat([IDS, IDS + 2]), MASK.repeat(2, 1), std_over=over)
    one = grpo(REWARDS, IDS, MASK, std_over=over, all_reduce=lambda x: 2 * x)
    torch.testing.assert_close(one, both[:4], rtol=0, atol=1e-12)


def test_leave_one_out() -> None:
    rewards, ids = torch.tensor([[1.0], [0.0], [0.0], [0.0]], dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    alone = grpo(rewards, ids, MASK, baseline="leave_one_out", normalize_std=False)
    torch.testing.assert_close(alone, rloo(rewards, ids, MASK), rtol=0, atol=0)
    got = grpo(rewards, ids, MASK, baseline="leave_one_out", eps=0.0)[:, 0]
    assert got.tolist() == pytest.approx([2, -2 / 3, -2 / 3, -2 / 3])


def test_leave_one_out_of_equal_rewards_gives_zero() -> None:
    rewards = torch.full((4, 1), 0.7)
    assert (grpo(rewards, IDS, MASK, baseline="leave_one_out") == 0).all()
