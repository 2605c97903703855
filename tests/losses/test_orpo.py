"""Fine-tuning on the chosen response, and the ratio of the odds."""

import math

import pytest
import torch

from rlprims.losses import orpo
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.orpo", check_loss, matters={"odds_coef": 1.0}),
]


def loss_and_gradients(chosen: float, rejected: float, **options) -> tuple[float, float, float]:
    """Of two responses of these probabilities (geometric means over tokens)."""
    a, b = (torch.tensor([math.log(p)], dtype=torch.float64, requires_grad=True) for p in (chosen, rejected))
    loss = orpo(a, b, **options)
    loss.sum().backward()
    return loss.item(), a.grad.item(), b.grad.item()


def test_by_hand() -> None:
    """Odds of 3 and ¼, a ratio of 12: σ = 12/13."""
    loss, up, down = loss_and_gradients(0.75, 0.2, odds_coef=0.5)
    assert loss == pytest.approx(-math.log(0.75) - 0.5 * math.log(12 / 13))
    # the paper's δ = 1 / (1 + odds ratio), times 1 / (1 − p) of each response
    assert up == pytest.approx(-1 - 0.5 / 13 / 0.25)
    assert down == pytest.approx(0.5 / 13 / 0.8)


@pytest.mark.parametrize(("chosen", "rejected"), [(1.0, 0.5), (0.5, 1.0), (1.0, 1.0), (1e-300, 1.0)])
def test_certain_responses_are_finite(chosen: float, rejected: float) -> None:
    assert all(map(math.isfinite, loss_and_gradients(chosen, rejected)))


def test_the_coefficient_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="odds_coef"):
        loss_and_gradients(0.5, 0.5, odds_coef=0.0)
