"""A loss that says its own slope, beside the same formula differentiated by torch."""

from functools import partial

import pytest
import torch
from torch import Tensor

from rlprims.losses import clipped_surrogate
from rlprims.losses._with_slope import with_slope

LARGE = (1030, 300)  # more than one block of rows


def plain(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Tensor:
    """The paper's formula, token by token of those that count."""
    ratio = (log_probs[mask] - old[mask]).clamp(-20, 20).exp()
    a = advantages[mask]
    objective = torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)
    if dual_clip is not None:
        objective = torch.where(a < 0, torch.maximum(objective, dual_clip * a), objective)
    return torch.zeros_like(log_probs).masked_scatter(mask, -objective)


def batch(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ratios on both sides of every bound, some beyond e^20; holes in the mask, and there what must not be read."""
    generator = torch.Generator().manual_seed(0)
    log_probs, noise, advantages = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    old = log_probs + noise * torch.where(torch.rand(shape, generator=generator) < 0.1, 30.0, 0.5)
    mask = torch.rand(shape, generator=generator) < 0.7
    poison = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38]).repeat(mask.numel() // 4 + 1)[: mask.numel()]
    poisoned = (torch.where(mask, x, poison.view(shape)).to(dtype) for x in (log_probs, old, advantages))
    return *poisoned, mask


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("shape", [(3, 7), LARGE])
@pytest.mark.parametrize("packed", [False, True])
def test_value_and_gradient_are_those_of_the_formula(
    shape: tuple[int, int], dual_clip: float | None, packed: bool
) -> None:
    log_probs, *constants, mask = batch(shape)
    log_probs.requires_grad_()
    clip = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    want = plain(log_probs, *constants, mask, **clip)
    upstream = torch.linspace(-1, 1, mask.numel()).view(shape)
    (slope,) = torch.autograd.grad(want, log_probs, upstream)

    tokens, cu = (log_probs, *constants, mask), None
    if packed:
        tokens, cu = tuple(x.flatten() for x in tokens), torch.arange(shape[0] + 1) * shape[1]
    got = clipped_surrogate(*tokens, cu, **clip).view(shape)
    assert torch.equal(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, log_probs, upstream)[0], slope, rtol=3e-7, atol=0)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_gradcheck(dual_clip: float | None) -> None:
    log_probs, old, advantages, mask = batch((4, 5), torch.float64)
    loss = partial(clipped_surrogate, dual_clip=dual_clip)
    log_probs = torch.where(mask, log_probs, 0.0).requires_grad_()  # finite, so that it can be moved a little
    assert torch.autograd.gradcheck(loss, (log_probs, old, advantages, mask))


def test_the_graph_may_be_used_twice_but_not_differentiated_twice() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    y = with_slope(lambda x: (x.square(), 2 * x), torch.tensor([True]), x)
    for _ in range(2):
        assert torch.autograd.grad(y, x, retain_graph=True)[0].item() == 6
    with pytest.raises(RuntimeError, match="no gradient of its own"):
        torch.autograd.grad(y, x, create_graph=True)


def test_without_a_gradient_no_slopes_are_kept() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    with torch.no_grad():
        assert not with_slope(lambda x: (x.square(), 2 * x), torch.tensor([True]), x).requires_grad


def test_it_traces_in_one_graph_with_the_same_gradient() -> None:
    log_probs, *constants = batch((3, 7))
    log_probs.requires_grad_()
    traced = torch.compile(clipped_surrogate, fullgraph=True, backend="aot_eager")
    want, got = (f(log_probs, *constants, dual_clip=3.0) for f in (clipped_surrogate, traced))
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(y.sum(), log_probs)[0] for y in (want, got)))
