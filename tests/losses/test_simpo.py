"""A lead of means, without a reference."""

import math

import pytest
import torch

from rlprims.losses import simpo
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.simpo", check_loss, matters={"beta": 1.0, "margin": 0.5, "alpha": 0.25, "nll_coef": 0.5}),
    Record("losses.simpo", check_loss, call={"alpha": 0.25, "nll_coef": 1.0}),
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


CHOSEN = [-2.040106003613106, -1.515639728799576, -1.0187658862549018, -1.9414953682439207]
REJECTED = [-1.3900482402455296, -1.6822957843604074, -0.4572123504015019, -0.8022152487878568]


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"alpha": 0.25, "beta": 2.5, "margin": 0.1}, [2.669727, 0.466037, 1.94416, 4.143031]),
        ({"alpha": -0.5, "beta": 2.0, "margin": 0.5}, [1.352983, 0.883448, 1.524623, 1.836687]),
        ({"beta": 2.0, "margin": 0.5}, [1.953077, 0.77996, 1.803163, 2.838835]),
        ({"beta": 0.1, "margin": 0.0}, [0.726178, 0.684849, 0.721619, 0.751733]),
    ],
)
def test_trls_numbers(options: dict, theirs: list[float]) -> None:
    """``CPOTrainer.cpo_loss`` of TRL 1.16.0: its losses "simpo", and last "sigmoid", of these log-probs."""
    got = simpo(torch.tensor(CHOSEN, dtype=torch.float64), torch.tensor(REJECTED, dtype=torch.float64), **options)
    assert got.tolist() == pytest.approx(theirs, abs=1e-6)


def test_alphapo_by_hand() -> None:
    """(1 − p^−α) / α at α = −1 is p − 1, and at α = 1 it is 1 − 1/p: gaps of ¼, and of 2."""
    half, quarter = math.log(0.5), math.log(0.25)
    assert loss_and_gradients(half, quarter, beta=4.0, margin=0.0, alpha=-1.0) == pytest.approx(
        (math.log1p(math.exp(-1)), -2 / (1 + math.e), 1 / (1 + math.e))
    )
    assert loss_and_gradients(half, quarter, beta=0.5, margin=0.0, alpha=1.0)[0] == pytest.approx(
        math.log1p(math.exp(-1))
    )


def test_the_limit_of_alpha_is_simpo() -> None:
    assert loss_and_gradients(-0.5, -1.5, alpha=1e-7) == pytest.approx(loss_and_gradients(-0.5, -1.5), rel=1e-6)


def test_cpo_by_hand() -> None:
    """Of sums of −10 and −20 with β = 0.1: −log σ(1), and the chosen response's own log-prob."""
    loss, up, down = loss_and_gradients(-10.0, -20.0, beta=0.1, margin=0.0, nll_coef=0.5)
    surprise = 1 / (1 + math.e)
    assert (loss, up, down) == pytest.approx((math.log1p(math.exp(-1)) + 5, -0.1 * surprise - 0.5, 0.1 * surprise))


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"margin": -1.0}, {"nll_coef": -1.0}, {"alpha": math.inf}])
def test_options_that_make_no_sense_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        loss_and_gradients(-1.0, -1.0, **options)
