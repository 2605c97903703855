"""A lead of means, without a reference."""

import math

import pytest
import torch

from rlprims.losses import simpo
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.simpo", check_loss, matters={"beta": 1.0, "margin": 0.5}),
]


def loss_and_gradients(chosen: float, rejected: float, **options) -> tuple[float, float, float]:
    a, b = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (chosen, rejected))
    loss = simpo(a, b, **options)
    loss.sum().backward()
    return loss.item(), a.grad.item(), b.grad.item()


def test_by_hand() -> None:
    """β (−0.5 + 1.5) − γ = 2.5 − 0.5 = 2."""
    surprise = 1 / (1 + math.exp(2))
    got = loss_and_gradients(-0.5, -1.5, beta=2.5, margin=0.5)
    assert got == pytest.approx((math.log1p(math.exp(-2)), -2.5 * surprise, 2.5 * surprise))


def test_the_default_asks_for_a_lead_of_one_half() -> None:
    assert loss_and_gradients(-0.5, -1.0)[0] == pytest.approx(math.log(2))


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"margin": -1.0}])
def test_options_that_make_no_sense_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        loss_and_gradients(-1.0, -1.0, **options)
