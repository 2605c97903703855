"""PPO's clip that leaves a clipped token the gradient of the bound."""

import math

import pytest
import torch

from rlprims.losses import clipped_surrogate, gppo
from rlprims.testing import check_loss
from tests.records import DERIVATIVES, Record

RECORDS = [
    Record(
        "losses.gppo",
        check_loss,
        matters={"clip_low": 0.1, "clip_high": 0.28, "beta_low": 0.75, "beta_high": 0.5},
        exempt=dict.fromkeys(DERIVATIVES, "a clipped token is given the gradient that it had on the bound"),
    ),
]


def loss_and_gradient(ratio: float, advantage: float, loss=gppo, **options: float) -> tuple[float, float]:
    x = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([[advantage]], dtype=torch.float64)
    got = loss(x, torch.zeros_like(a), a, torch.tensor([[True]]), **options)
    got.sum().backward()
    return got.item(), x.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (0.5, 1.0, -0.5, -0.5),
        (1.0, 1.0, -1.0, -1.0),
        (2.0, 1.0, -1.28, -1.28),  # above, A > 0: PPO has no gradient here
        (0.5, -1.0, 0.8, 0.8),  # below, A < 0: nor here
        (1.0, -1.0, 1.0, 1.0),
        (2.0, -1.0, 2.0, 2.0),
    ],
)
def test_the_four_quadrants(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert loss_and_gradient(ratio, advantage, clip_high=0.28) == pytest.approx((loss, gradient))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.3, 0.9, 1.1, 4.0])
def test_the_value_is_ppos_and_with_betas_of_zero_the_gradient_is(ratio: float, advantage: float) -> None:
    ppo = loss_and_gradient(ratio, advantage, clipped_surrogate)
    assert loss_and_gradient(ratio, advantage)[0] == pytest.approx(ppo[0])
    assert loss_and_gradient(ratio, advantage, beta_low=0.0, beta_high=0.0)[1] == pytest.approx(ppo[1])


def test_ce_gppo_weighs_the_sides() -> None:
    betas = {"beta_low": 0.75, "beta_high": 0.5}
    assert loss_and_gradient(0.5, -1.0, **betas)[1] == pytest.approx(0.6)
    assert loss_and_gradient(2.0, 1.0, **betas)[1] == pytest.approx(-0.6)
    assert loss_and_gradient(0.5, 1.0, **betas)[1] == pytest.approx(-0.5)


@pytest.mark.parametrize("options", [{"clip_low": 1.5}, {"clip_high": -1.0}, {"beta_low": -1.0}, {"beta_high": -1.0}])
def test_options_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        loss_and_gradient(1.0, 1.0, **options)
