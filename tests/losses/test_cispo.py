"""A bounded weight that is a constant: no token loses its gradient."""

import math

import pytest
import torch

from rlprims.losses import cispo
from rlprims.testing import check_loss
from tests.records import DETACHED_WEIGHT, SCORE_FUNCTION, Record

RECORDS = [
    Record(
        "losses.cispo", check_loss, matters={"w_min": 0.8, "w_max": 1.2}, exempt={**DETACHED_WEIGHT, **SCORE_FUNCTION}
    ),
]


def loss_and_gradient(log_prob: float, old: float, advantage: float, **bounds: float) -> tuple[float, float]:
    x = torch.tensor([[log_prob]], dtype=torch.float64, requires_grad=True)
    old_x, a = (torch.tensor([[v]], dtype=torch.float64) for v in (old, advantage))
    loss = cispo(x, old_x, a, torch.tensor([[True]]), **bounds)
    loss.sum().backward()
    return loss.item(), x.grad.item()


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.5), (1.0, 1.0), (1.25, 1.25), (6.0, 5.0), (1e30, 5.0)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_weights_by_default(ratio: float, weight: float, advantage: float) -> None:
    got = loss_and_gradient(-3.0, -3.0 - math.log(ratio), advantage)
    assert got == pytest.approx((3 * weight * advantage, -weight * advantage))


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.8), (1.0, 1.0), (1.25, 1.2), (6.0, 1.2)])
def test_weights_of_slime_and_nemo_rl(ratio: float, weight: float) -> None:
    assert loss_and_gradient(-1.0, -1.0 - math.log(ratio), 1.0, w_min=0.8, w_max=1.2)[1] == pytest.approx(-weight)


@pytest.mark.parametrize(
    ("log_prob", "old", "advantage", "gradient"),
    [(-1.336943, -1.114472, -0.151346, 0.003671), (-1.543706, -1.759081, 1.117969, -0.04202)],
)
def test_verl_0_9_1(log_prob: float, old: float, advantage: float, gradient: float) -> None:
    """verl:public:policy_loss.cispo/000, a token mean of 33."""
    got = loss_and_gradient(log_prob, old, advantage, w_min=0.8, w_max=1.28)
    assert got[1] / 33 == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(
    ("log_prob", "old", "advantage", "gradient"),
    [(-1.337932, -1.42179, -1.13536, 1.234676), (-0.717572, -0.50795, 0.941648, -0.763573)],
)
def test_skyrl(log_prob: float, old: float, advantage: float, gradient: float) -> None:
    """skyrl:public:skyrl_loss.cispo/000 (git a9564572e), whose bounds are our defaults."""
    assert loss_and_gradient(log_prob, old, advantage)[1] == pytest.approx(gradient, abs=2e-6)


@pytest.mark.parametrize("bounds", [{"w_max": 0.2}, {"w_min": 1.1}, {"w_min": -0.2}])
def test_a_distance_in_place_of_a_bound_is_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="w_max"):
        loss_and_gradient(-1.0, -1.0, 1.0, **bounds)
