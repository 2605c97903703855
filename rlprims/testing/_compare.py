"""Comparisons whose messages show what differs, where, and by how much."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlprims.testing._primitive import CallOutcome

NAN = "a result is NaN for data that are finite"


def assert_close(what: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """|got − want| <= tolerance · max(1, |want|) everywhere; with tolerance 0 all numbers must be equal.

    NaN in both is an error too, and has one message for all laws.
    """
    assert got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if not got.numel() or torch.equal(got, want):
        return
    if not got.is_floating_point():
        where = (got != want).nonzero()[0].tolist()
        raise AssertionError(f"{what} differs, first at {where}: {got[tuple(where)]} instead of {want[tuple(where)]}")
    wide_got, wide_want = got.double(), want.double()
    both_nan = wide_got.isnan() & wide_want.isnan()
    error = torch.where((wide_got == wide_want) | both_nan, 0.0, (wide_got - wide_want).abs())
    error = torch.where(error.isnan(), torch.inf, error)
    if bool((both_nan | (error <= tolerance * wide_want.abs().clamp(min=1.0))).all()):
        assert not both_nan.any(), NAN
        return
    flat = int(error.argmax())
    where = [int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape)]
    raise AssertionError(
        f"{what} differs by up to {error.max():.3g} at {where}: "
        f"{got.flatten()[flat]:.6g} instead of {want.flatten()[flat]:.6g}"
    )


def assert_same(got: CallOutcome, want: CallOutcome, tolerance: float, of: str = "") -> None:
    """Assert equal values and equal gradients, up to the tolerance."""
    assert_close(f"the value{of}", got.value, want.value, tolerance)
    for name, gradient in want.gradients.items():
        assert_close(f"the gradient of {name}{of}", got.gradients[name], gradient, tolerance)


def assert_finite(outcome: CallOutcome, of: str = "") -> None:
    for what, x in {"value": outcome.value, **outcome.gradients}.items():
        name = f"the value{of}" if what == "value" else f"the gradient of {what}{of}"
        bad = (~x.isfinite()).nonzero()
        assert not len(bad), f"{name} has {len(bad)} non-finite entries, first at {bad[0].tolist()}"


def assert_derivative(what: str, f: Callable[[Tensor], Tensor], x: Tensor, *, fast: bool = False) -> None:
    """gradcheck of ``f`` at ``x``, float64, entry by entry or in a random direction.

    If it fails, the message has the largest difference from central differences.
    """
    x = x.detach().clone().requires_grad_()
    if torch.autograd.gradcheck(f, x, raise_exception=False, fast_mode=fast):
        return
    if fast:
        raise AssertionError(f"{what} of {x.numel()} numbers is refused by gradcheck")
    (gradient,) = torch.autograd.grad(f(x).sum(), x)
    slope = torch.zeros_like(gradient)
    with torch.no_grad():
        for i in range(x.numel()):
            step = torch.zeros_like(slope).flatten()
            step[i] = 1e-6
            step = step.reshape(x.shape)
            slope.view(-1)[i] = (f(x + step) - f(x - step)).sum() / 2e-6
    assert_close(what, gradient, slope, 1e-5)
    raise AssertionError(f"{what} is refused by gradcheck")


def assert_zero(what: str, x: Tensor) -> None:
    bad = ((x != 0) | x.isnan()).nonzero()
    if len(bad):
        first = tuple(bad[0].tolist())
        raise AssertionError(f"{what} is {x[first]:.6g} at {list(first)}, expected exactly 0")
