"""``examples/surrogate.py``: slopes that are known, and its picture."""

import doctest

import pytest
import torch

from examples import surrogate
from rlprims import algorithms, losses
from rlprims.algorithms import use


def test_its_examples():
    assert doctest.testmod(surrogate) == (0, 7)


def test_the_clipped_surrogate_is_flat_exactly_where_it_clips():
    loss = use(losses.clipped_surrogate, clip_low=0.2, clip_high=0.28)
    curve = surrogate.surrogate(loss, torch.arange(5, 250, 10) / 100)
    flat_above, flat_below = curve.ratio > 1.28, curve.ratio < 0.8
    assert bool((curve.coefficient[1][flat_above] == 0).all())
    assert bool((curve.coefficient[-1][flat_below] == 0).all())
    torch.testing.assert_close(curve.coefficient[1][~flat_above], curve.ratio[~flat_above])
    torch.testing.assert_close(curve.coefficient[-1][~flat_below], curve.ratio[~flat_below])
    torch.testing.assert_close(curve.loss[1], -curve.ratio.clamp(max=1.28))
    torch.testing.assert_close(curve.loss[-1], curve.ratio.clamp(min=0.8))


def test_the_coefficient_is_the_slope_of_the_loss():
    """dL/dlog π = ρ dL/dρ, by differences; SAPO is smooth."""
    ratio = torch.linspace(0.2, 2.0, 20_001, dtype=torch.float64)
    curve = surrogate.surrogate(algorithms.sapo(), ratio)
    for sign in (1, -1):
        slope = (curve.loss[sign][2:] - curve.loss[sign][:-2]) / (ratio[2:] - ratio[:-2])
        torch.testing.assert_close(curve.coefficient[sign][1:-1], -sign * ratio[1:-1] * slope, rtol=1e-6, atol=1e-6)


def test_ratios_that_no_probability_gives_are_refused():
    with pytest.raises(ValueError, match="probability"):
        surrogate.surrogate(losses.clipped_surrogate, torch.tensor([11.0]))


@pytest.mark.parametrize("name", sorted(set(algorithms.PRESETS) - {"opsd", "sdft"}))  # whose losses have no ratio
def test_every_preset_has_a_surrogate(name):
    curve = surrogate.surrogate(algorithms.PRESETS[name](), torch.tensor([0.5, 1.0, 1.5]))
    assert all(bool(x.isfinite().all()) for x in [*curve.loss.values(), *curve.coefficient.values()])


def test_the_picture_has_two_labelled_panels_with_both_signs():
    figure = surrogate.surrogate(losses.clipped_surrogate).draw()
    assert [axis.get_xlabel() for axis in figure.axes] == ["ratio  π / π_old"] * 2
    assert [[line.get_label() for line in axis.lines[:2]] for axis in figure.axes] == [["A = +1", "A = −1"]] * 2


def test_surrogate_prints_numbers():
    text = repr(surrogate.surrogate(losses.clipped_surrogate))
    assert text.startswith("losses.clipped_surrogate, every")
    assert "coefficient A=+1" in text
