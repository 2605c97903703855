"""A clip whose bounds depend on how likely the token was."""

import math

import pytest
import torch

from rlprims.losses import dcpo
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.dcpo", check_loss, matters={"clip_low": 0.01, "clip_high": 0.01, "max_ratio": 1.1}),
]


def loss_and_gradient(q: float, p: float, advantage: float, **options: float) -> tuple[float, float]:
    """Of one token with probability q before and p now, the gradient with respect to its log-prob."""
    log_probs = torch.tensor([[math.log(p)]], dtype=torch.float64, requires_grad=True)
    a, old = torch.tensor([[advantage]], dtype=torch.float64), torch.tensor([[math.log(q)]], dtype=torch.float64)
    loss = dcpo(log_probs, old, a, torch.tensor([[True]]), **options)
    loss.sum().backward()
    return loss.item(), log_probs.grad.item()


@pytest.mark.parametrize(
    ("q", "low", "high"),
    [(0.9, 0.69, None), (0.01, 0.005, 0.05)],  # the table of the authors' README: probabilities, 0.16 below, 0.2 above
)
def test_the_authors_bounds(q: float, low: float, high: float | None) -> None:
    """A clipped loss is the bound of the ratio times A."""
    assert loss_and_gradient(q, 1e-6, -1.0)[0] * q == pytest.approx(low, abs=0.005)
    if high is not None:
        assert -loss_and_gradient(q, 0.9, 1.0)[0] * q == pytest.approx(high, abs=0.005)


@pytest.mark.parametrize("q", [0.9, 0.7, 0.3, 0.1])
def test_at_a_bound_the_change_weighted_by_the_probability_is_the_threshold(q: float) -> None:
    """|ρ − 1| ρ q = ε, where such a ρ exists: below it does for q >= 4 ε."""
    options = {"clip_low": 0.02, "clip_high": 0.03}
    high, low = -loss_and_gradient(q, 5.0, 1.0, **options)[0], loss_and_gradient(q, 1e-6, -1.0, **options)[0]
    assert high > 1 > low
    assert (high - 1) * high * q == pytest.approx(0.03)
    assert (1 - low) * low * q == pytest.approx(0.02)


def test_the_four_quadrants() -> None:
    """Bounds of ½ + ½ √½ and ½ + ½ √2 at q = 0.4, if both thresholds are an eighth of q, and a quarter of it."""
    options = {"clip_low": 0.05, "clip_high": 0.1}
    low, high = 0.5 + 0.5 * math.sqrt(0.5), 0.5 + 0.5 * math.sqrt(2)
    assert loss_and_gradient(0.4, 0.2, 1.0, **options) == pytest.approx((-0.5, -0.5))
    assert loss_and_gradient(0.4, 0.2, -1.0, **options) == pytest.approx((low, 0.0))
    assert loss_and_gradient(0.4, 0.8, 1.0, **options) == pytest.approx((-high, 0.0))
    assert loss_and_gradient(0.4, 0.8, -1.0, **options) == pytest.approx((2.0, 2.0))


def test_the_ratio_of_a_token_that_was_almost_impossible_is_bounded() -> None:
    assert loss_and_gradient(1e-7, 1e-5, 1.0)[0] == pytest.approx(-10.0)
    assert loss_and_gradient(1e-7, 1e-5, 1.0, max_ratio=3.0)[0] == pytest.approx(-3.0)


@pytest.mark.parametrize("options", [{"clip_low": -0.1}, {"clip_high": -0.1}, {"max_ratio": 0.9}])
def test_options_that_make_no_sense_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        loss_and_gradient(0.5, 0.5, 1.0, **options)
