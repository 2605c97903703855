"""Single responses, good and bad, against a baseline."""

import math

import pytest
import torch

from rlprims.losses import kto
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.implicit_reward", check_loss, matters={"beta": 0.2}),
    Record("losses.kto", check_loss, matters={"beta": 1.0, "desirable_weight": 2.0, "undesirable_weight": 2.0}),
]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def loss_and_gradient(gain: float, baseline: float, desirable: bool, **options) -> tuple[float, float]:
    """Of a response whose log-prob is ``gain`` above the reference's."""
    x = torch.tensor([gain - 7.0], dtype=torch.float64, requires_grad=True)
    ref, z = torch.full_like(x, -7.0), torch.full_like(x, baseline)
    loss = kto(x, ref, z, torch.tensor([desirable]), **options)
    loss.sum().backward()
    return loss.item(), x.grad.item()


def test_by_hand() -> None:
    """β (r − z) = 0.5 (3 − 1) = 1; the slope of σ there is σ(1) σ(−1)."""
    slope = 0.5 * sigmoid(1) * sigmoid(-1)
    good = loss_and_gradient(3.0, 1.0, True, beta=0.5, desirable_weight=1.5)
    assert good == pytest.approx((1.5 * (1 - sigmoid(1)), -1.5 * slope))
    bad = loss_and_gradient(3.0, 1.0, False, beta=0.5, undesirable_weight=0.7)
    assert bad == pytest.approx((0.7 * (1 - sigmoid(-1)), 0.7 * slope))


@pytest.mark.parametrize("desirable", [True, False])
def test_a_weight_of_zero_excludes_its_kind(desirable: bool) -> None:
    weights = {"desirable_weight": 0.0} if desirable else {"undesirable_weight": 0.0}
    assert loss_and_gradient(3.0, 1.0, desirable, **weights) == (0.0, 0.0)
    assert loss_and_gradient(3.0, 1.0, not desirable, **weights)[0] > 0


def test_far_responses_have_saturated() -> None:
    for gain in (1e4, -1e4):
        for desirable in (True, False):
            loss, gradient = loss_and_gradient(gain, 0.0, desirable)
            assert loss == pytest.approx(float((gain > 0) != desirable))
            assert gradient == 0


def test_the_baseline_is_a_constant() -> None:
    x, z = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    kto(x, torch.zeros(2), z, torch.tensor([True, False])).sum().backward()
    assert z.grad is None


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"desirable_weight": -1.0}, {"undesirable_weight": -1.0}])
def test_options_that_make_no_sense_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        loss_and_gradient(0.0, 0.0, True, **options)


def test_a_float_for_desirable_is_refused() -> None:
    with pytest.raises(ValueError, match=r"desirable .*expected bool"):
        kto(torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.ones(2))
