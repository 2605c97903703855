"""Advantages over the density of the prompts' pass rates."""

import math

import pytest
import torch

from rlprims.advantage import beta_normalized, grpo
from rlprims.testing import check_advantage
from tests.records import Record


def doubled_in_number(x: torch.Tensor) -> torch.Tensor:
    """The all_reduce of two ranks, when the other has as many prompts, none of which passes."""
    return x * torch.tensor([2.0, 1.0], dtype=x.dtype, device=x.device) if len(x) == 2 else x


RECORDS = [
    Record(
        "advantage.beta_normalized",
        check_advantage,
        matters={"tolerance": 10.0, "all_reduce": doubled_in_number},
        exempt={
            "a shift of a group cancels": "rewards are 0 or 1",
            "nan stays in its group": "the Beta distribution is that of all prompts of the batch",
        },
    ),
]


def right_of(n: int, *right: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Groups of n, of which so many are right, first the right ones."""
    scores = torch.tensor([float(i < r) for r in right for i in range(n)], dtype=torch.float64)
    ids = torch.arange(len(right)).repeat_interleave(n)
    return scores[:, None], ids, torch.ones(len(scores), 1, dtype=torch.bool)


def densities(*right: int, n: int = 8) -> list[float]:
    """f of each group, read off its first response, which is right."""
    got = beta_normalized(*right_of(n, *right))[::n, 0].tolist()
    return [(1 - r / n) / a for r, a in zip(right, got, strict=True)]


def test_two_prompts() -> None:
    """p = ¼ and ¾: m = ½, v = 1/16, c = 3, so α = β = 3/2 and f(¼) = f(¾) = (8/π) √(3/16)."""
    f = 8 / math.pi * (3 / 16) ** 0.5
    got = beta_normalized(*right_of(4, 1, 3))[:, 0].tolist()
    want = [0.75 / f, *[-0.25 / f] * 3, *[0.25 / f] * 3, -0.75 / f]
    assert got == pytest.approx(want, abs=1e-12)


def test_alpha_and_beta_give_the_least_second_moment() -> None:
    """For p ~ Beta(a, b) it is B(α, β)² B(a + 3 − 2α, b + 3 − 2β) / B(a, b), whose slope must be 0.

    p = ¼, ¼ and ¾ have m = 5/12 and v = 1/18, so c = 35/144 · 18 − 1 = 27/8, a = 45/32 and b = 63/32. Two densities
    tell α and β: log f = (α − 1) log p + (β − 1) log(1 − p) − log B(α, β).
    """
    a, b = 45 / 32, 63 / 32
    x = torch.tensor([1 + a / 3, 1 + b / 3], dtype=torch.float64, requires_grad=True)

    def log_beta(alpha: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return alpha.lgamma() + beta.lgamma() - (alpha + beta).lgamma()

    second_moment = 2 * log_beta(x[0], x[1]) + log_beta(a + 3 - 2 * x[0], b + 3 - 2 * x[1])
    (slope,) = torch.autograd.grad(second_moment, x)
    assert slope.abs().max() < 1e-12

    alpha, beta = x.detach()
    f = [p ** (alpha - 1) * (1 - p) ** (beta - 1) / log_beta(alpha, beta).exp() for p in (1 / 4, 1 / 4, 3 / 4)]
    assert densities(2, 2, 6) == pytest.approx([float(y) for y in f], abs=1e-12)


def test_prompts_in_groups_of_different_size_weigh_the_same() -> None:
    rewards, ids, mask = right_of(4, 1, 3)
    want = beta_normalized(rewards, ids, mask)
    more = torch.cat([rewards, rewards[4:]]), torch.cat([ids, ids[4:]]), torch.cat([mask, mask[4:]])
    torch.testing.assert_close(beta_normalized(*more)[:8], want, rtol=0, atol=1e-12)


def test_a_prompt_of_which_no_response_counts_is_no_prompt() -> None:
    valid = torch.tensor([True] * 8 + [False] * 4)
    got = beta_normalized(*right_of(4, 1, 3, 0), valid_rows=valid)
    torch.testing.assert_close(got[:8], beta_normalized(*right_of(4, 1, 3)), rtol=0, atol=1e-12)


def test_prompts_that_pass_or_fail_as_a_whole_leave_the_centred_reward() -> None:
    """v = m (1 − m), so that c = 0 and f = 1; groups of equal rewards have nothing to say either way."""
    assert (beta_normalized(*right_of(4, 4, 0)) == 0).all()


@pytest.mark.parametrize("right", [(1,), (1, 1), (3, 3, 3)])
def test_where_no_beta_can_be_fitted_it_is_the_centred_reward(right: tuple[int, ...]) -> None:
    batch = right_of(4, *right)
    torch.testing.assert_close(beta_normalized(*batch), grpo(*batch, normalize_std=False), rtol=0, atol=1e-12)


def test_the_tolerance_is_of_the_deviation() -> None:
    """p = ¼ and ¾ deviate by ¼."""
    batch = right_of(4, 1, 3)
    torch.testing.assert_close(beta_normalized(*batch, tolerance=0.2), beta_normalized(*batch), rtol=0, atol=0)
    centred = grpo(*batch, normalize_std=False)
    torch.testing.assert_close(beta_normalized(*batch, tolerance=0.3), centred, rtol=0, atol=1e-12)


def test_a_rare_prompt_is_finite() -> None:
    """999 prompts of 32 right in 64 and one of 1: its density is below 1e-20."""
    got = beta_normalized(*right_of(64, *[32] * 999, 1)).float()
    assert got.isfinite().all()
    assert got[999 * 64] == pytest.approx(63 / 64 * math.exp(20))


def test_two_ranks_agree_with_one() -> None:
    both = beta_normalized(*right_of(4, 1, 3, 1, 3))
    one = beta_normalized(*right_of(4, 1, 3), all_reduce=lambda x: 2 * x)
    torch.testing.assert_close(one, both[:8], rtol=0, atol=1e-12)


def test_means_outside_the_rates_give_zero() -> None:
    mask, ids = torch.ones(4, 1, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    got = beta_normalized(torch.tensor([[3.0], [1.0], [-1.0], [0.0]]), ids, mask)
    assert (got == 0).all()


def test_packed_and_padded_agree() -> None:
    rewards, ids, mask = right_of(4, 1, 3)
    wide = torch.cat([rewards, torch.full((8, 1), torch.nan)], dim=1)
    lengths = torch.tensor([1, 2] * 4)
    mask = torch.arange(2) < lengths[:, None]
    wide[mask & (torch.arange(2) == 1)] = 0.0
    cu = torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])
    packed = beta_normalized(wide[mask], ids, mask[mask], cu)
    torch.testing.assert_close(packed, beta_normalized(wide, ids, mask)[mask], rtol=0, atol=1e-12)
