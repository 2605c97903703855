"""Tokens whose probability has moved too far are left out, whichever way and whatever their advantage."""

import math

import pytest
import torch

from rlprims.losses import dppo, kl, tv_symmetric
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.tv_symmetric", check_loss, matters={"threshold": 0.01}),
]


def loss_and_gradient(now: float, then: float, advantage: float, fn=tv_symmetric, **options) -> tuple[float, float]:
    x = torch.tensor([[math.log(now)]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[math.log(then)]], dtype=torch.float64)
    loss = fn(x, q, torch.full_like(q, advantage), torch.tensor([[True]]), **options)
    loss.sum().backward()
    return loss.item(), x.grad.item()


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(
    ("now", "then", "weight"),
    [(0.5, 0.5, 1.0), (0.55, 0.5, 1.1), (0.45, 0.5, 0.9), (0.7, 0.5, 0.0), (0.3, 0.5, 0.0), (0.09, 0.01, 9.0)],
)
def test_the_weight(now: float, then: float, advantage: float, weight: float) -> None:
    assert loss_and_gradient(now, then, advantage) == pytest.approx((-weight * advantage,) * 2)


def test_dppo_lets_a_token_come_back_and_this_does_not() -> None:
    assert loss_and_gradient(0.9, 0.5, -1.0)[1] == 0
    assert loss_and_gradient(0.9, 0.5, -1.0, dppo)[1] == pytest.approx(1.8)


def test_with_the_term_that_prime_rl_adds() -> None:
    """0.001 (log ρ)², its kl_tau, is k2 to the sampler at 0.002."""
    x, q, one = (torch.tensor([[y]], dtype=torch.float64) for y in (math.log(0.55), math.log(0.5), 1.0))
    mask = torch.tensor([[True]])
    got = tv_symmetric(x, q, one, mask) + 0.002 * kl(x, q, mask, value="k2")
    assert got.item() == pytest.approx(-1.1 + 0.001 * math.log(1.1) ** 2)


def test_a_threshold_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="threshold"):
        loss_and_gradient(0.5, 0.5, 1.0, threshold=-0.1)
