"""A square with its least value at a margin of 1/(2τ)."""

import pytest
import torch
from torch import Tensor

from rlprims.losses import ipo
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.ipo", check_loss, matters={"tau": 0.2}),
]


def loss_and_gradient(margin: float, tau: float) -> tuple[float, float]:
    """Of the margin, put together from all four."""
    chosen = torch.tensor([margin - 3.0], dtype=torch.float64, requires_grad=True)
    rest: list[Tensor] = [torch.tensor([x], dtype=torch.float64) for x in (-1.0, -2.0, 1.0)]
    loss = ipo(chosen, *rest, tau=tau)  # (margin − 3 + 2) − (−1 − 1) = margin + 1
    loss.sum().backward()
    return loss.item(), chosen.grad.item()


def test_by_hand() -> None:
    assert loss_and_gradient(2.0, 0.25) == (1.0, 2.0)  # (3 − 2)², 2 (3 − 2)
    assert loss_and_gradient(-1.0, 0.25) == (4.0, -4.0)


@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
def test_ipo_is_least_at_one_over_two_tau(tau: float) -> None:
    best = 1 / (2 * tau) - 1
    assert loss_and_gradient(best, tau) == pytest.approx((0.0, 0.0))
    assert loss_and_gradient(best + 0.1, tau) == pytest.approx((0.01, 0.2))
    assert loss_and_gradient(best - 0.1, tau) == pytest.approx((0.01, -0.2))


def test_tau_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="tau"):
        loss_and_gradient(1.0, 0.0)
