"""A gate that fades: its slope at 1, its two temperatures, and what a ratio far away keeps."""

import math

import pytest
import torch

from rlprims.losses import sapo
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.sapo", check_loss, matters={"tau_pos": 0.5, "tau_neg": 2.0}),
]


def loss_and_gradient(log_ratio: float, advantage: float, **tau: float) -> tuple[float, float]:
    x = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([[advantage]], dtype=torch.float64)
    loss = sapo(x, torch.zeros_like(a), a, torch.tensor([[True]]), **tau)
    loss.sum().backward()
    return loss.item(), x.grad.item()


@pytest.mark.parametrize(("advantage", "value"), [(1.0, -2.0), (-1.0, 2 / 1.05), (0.0, 0.0)])
def test_on_policy(advantage: float, value: float) -> None:
    assert loss_and_gradient(0.0, advantage) == pytest.approx((value, -advantage))


@pytest.mark.parametrize(
    ("ratio", "advantage", "tau", "loss", "gradient"),
    [
        # tau 1: sigma(1) = 0.731059, its slope 0.196612; 4 of each, and the slope times the ratio
        (2.0, 1.0, 1.0, -2.924234, -1.572896),
        (2.0, -1.0, 1.0, 2.924234, 1.572896),
        # tau 2 at ratio 0.5: sigma(-1) = 0.268941; 2 of it; slope 4 * 0.196612 * 0.5
        (0.5, 1.0, 2.0, -0.537883, -0.393224),
    ],
)
def test_by_hand(ratio: float, advantage: float, tau: float, loss: float, gradient: float) -> None:
    got = loss_and_gradient(math.log(ratio), advantage, tau_pos=tau, tau_neg=tau)
    assert got == pytest.approx((loss, gradient), abs=1e-5)


def test_negative_advantages_are_trusted_less() -> None:
    good, bad = (abs(loss_and_gradient(math.log(2.0), a)[1]) for a in (1.0, -1.0))
    assert bad < good


def test_the_gradient_fades_and_is_never_cut() -> None:
    sizes = [-loss_and_gradient(math.log(ratio), 1.0)[1] for ratio in (2, 4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] > 0


@pytest.mark.parametrize(
    ("log_prob", "old", "advantage", "gradient"),
    [(-1.086631, -0.934351, -0.062033, 0.002943), (-0.001, -0.108114, 1.51016, -0.093086)],
)
def test_verl_0_9_1(log_prob: float, old: float, advantage: float, gradient: float) -> None:
    """verl:public:policy_loss.sapo/001, first of 6 responses, 3 tokens long."""
    assert loss_and_gradient(log_prob - old, advantage)[1] / 6 / 3 == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(
    ("log_prob", "old", "advantage", "gradient"),
    [(-1.337932, -1.42179, -1.13536, 1.232075), (-0.268423, -0.001, -1.126456, 0.84918)],
)
def test_skyrl(log_prob: float, old: float, advantage: float, gradient: float) -> None:
    """skyrl:public:skyrl_loss.sapo/000 (git a9564572e)."""
    assert loss_and_gradient(log_prob - old, advantage)[1] == pytest.approx(gradient, abs=3e-6)


@pytest.mark.parametrize("tau", [{"tau_pos": 0.0}, {"tau_neg": -1.0}])
def test_a_temperature_of_zero_is_refused(tau: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="tau"):
        loss_and_gradient(0.0, 1.0, **tau)
