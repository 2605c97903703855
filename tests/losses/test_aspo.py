"""The ratio of good tokens upside down, stopped where PPO stops."""

import math

import pytest
import torch

from rlprims.losses import aspo, clipped_surrogate
from rlprims.testing import check_loss
from tests.records import DETACHED_WEIGHT, Record

RECORDS = [
    Record(
        "losses.aspo", check_loss, matters={"clip_low": 0.5, "clip_high": 1.0, "w_max": 1.1}, exempt=DETACHED_WEIGHT
    ),
    Record("losses.aspo", check_loss, call={"w_max": 1.5}, exempt=DETACHED_WEIGHT),
]


def loss_and_gradient(ratio: float, advantage: float, fn=aspo, **options) -> tuple[float, float]:
    old = torch.tensor([[-2.0]], dtype=torch.float64)
    x = (old + math.log(ratio)).requires_grad_()
    loss = fn(x, old, torch.full_like(old, advantage), torch.tensor([[True]]), **options)
    loss.sum().backward()
    return loss.item(), x.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [
        (0.5, 1.0, 2.0),  # PPO: 0.5
        (0.9, 1.0, 1 / 0.9),
        (1.1, 1.0, 1 / 1.1),
        (1.25, 1.0, 0.0),  # PPO's clip
        (0.5, -1.0, 0.0),  # PPO's clip
        (0.9, -1.0, 0.9),
        (3.0, -1.0, 3.0),
        (3.0, -0.5, 3.0),
        (1.0, 2.0, 1.0),
        (1.0, 0.0, 1.0),
    ],
)
def test_the_weight(ratio: float, advantage: float, weight: float) -> None:
    assert loss_and_gradient(ratio, advantage) == pytest.approx((-weight * advantage,) * 2)


@pytest.mark.parametrize("ratio", [0.1, 0.79, 0.81, 1.0, 1.19, 1.21, 9.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_moves_if_and_only_if_ppo_moves_it_and_the_same_way(ratio: float, advantage: float) -> None:
    mine, ppo = (loss_and_gradient(ratio, advantage, fn)[1] for fn in (aspo, clipped_surrogate))
    assert (mine == 0) == (ppo == 0)
    assert mine * ppo >= 0
    if advantage < 0:
        assert mine == pytest.approx(ppo)


@pytest.mark.parametrize(("ratio", "advantage"), [(0.05, 1.0), (20.0, -1.0)])
def test_a_bounded_weight_keeps_its_gradient(ratio: float, advantage: float) -> None:
    assert loss_and_gradient(ratio, advantage)[1] == pytest.approx(-20 * advantage)
    assert loss_and_gradient(ratio, advantage, w_max=3.0)[1] == pytest.approx(-3 * advantage)


def test_the_bounds_are_of_the_ratio() -> None:
    assert loss_and_gradient(1.25, 1.0, clip_high=0.28)[1] == pytest.approx(-0.8)
    assert loss_and_gradient(0.5, -1.0, clip_low=0.6)[1] == pytest.approx(0.5)


@pytest.mark.parametrize("options", [{"w_max": 0.5}, {"clip_low": 1.5}, {"clip_high": -0.1}])
def test_options_that_make_no_sense_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        loss_and_gradient(1.0, 1.0, **options)
