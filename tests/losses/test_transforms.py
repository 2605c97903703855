"""Every transform of torch applies to a loss: gradients twice, forward mode, vmap, and writing to the result."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlprims import losses
from rlprims.losses import seq_mean_token_mean
from tests.losses.loss_batches import PER_TOKEN, Loss, batch, function_of, pack, poison

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
EVERY = pytest.mark.parametrize("name", PER_TOKEN)
LAYOUTS = pytest.mark.parametrize("layout", [dict, pack], ids=["padded", "packed"])

SMOOTH: list[tuple[str, dict[str, Any]]] = [
    ("clipped_surrogate", {"dual_clip": 1.3}),
    ("decoupled_ppo", {}),
    ("luffy", {"clip_high": 0.5}),
    ("sapo", {}),
    ("tv_symmetric", {}),
    ("reinforce", {}),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.2}),
    ("gspo", {"mean": "product", "clip_high": 9.0}),
    ("gmpo", {}),
    ("opmd", {}),
    ("kl", {}),
    ("weighted_kl", {}),
    ("full_kl", {}),
    ("full_kl", {"direction": "forward", "temperature": 0.7}),
    ("jsd", {"beta": 0.2}),
    ("topk_kl", {}),
    ("topk_kl", {"direction": "reverse"}),
    ("value_loss", {"clip": 0.5}),
    ("value_loss", {"huber_delta": 0.5}),
]
"""Losses without a stop-gradient on what they are differentiated by."""
REPRESENTATIVE = pytest.mark.parametrize(
    ("name", "options"), SMOOTH, ids=[f"{name}{''.join(f'-{v}' for v in options.values())}" for name, options in SMOOTH]
)


def finite_outside(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Constants poisoned outside the mask; what gradcheck moves must be finite there."""
    poisoned = poison(data)
    return poisoned | {
        name: data[name] for name in ("log_probs", "logits", "topk_log_probs", "new_values", "entropies")
    }


@REPRESENTATIVE
@LAYOUTS
def test_first_and_second_derivatives(name: str, options: dict[str, Any], layout: Callable[..., Any]) -> None:
    f, x = function_of(PER_TOKEN[name], layout(finite_outside(batch())), **options)
    x.requires_grad_()
    assert torch.autograd.gradcheck(f, (x,))
    assert torch.autograd.gradgradcheck(f, (x,))


@REPRESENTATIVE
@LAYOUTS
def test_forward_and_backward_derivatives_agree(name: str, options: dict[str, Any], layout: Callable[..., Any]) -> None:
    f, x = function_of(PER_TOKEN[name], layout(poison(batch())), **options)
    tangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    value, derivative = torch.func.jvp(f, (x,), (tangent,))
    gradient = torch.func.grad(lambda x: f(x).sum())(x)
    assert torch.equal(value, f(x))
    torch.testing.assert_close(derivative.sum(), (gradient * tangent).sum(), **CLOSE)
    x.requires_grad_()
    assert torch.equal(gradient, torch.autograd.grad(f(x).sum(), x)[0])


@REPRESENTATIVE
def test_vmap_gives_the_gradient_of_each_batch(name: str, options: dict[str, Any]) -> None:
    functions, inputs = zip(*(function_of(PER_TOKEN[name], batch(), **options) for _ in range(3)), strict=True)
    x = torch.stack([x + 0.1 * i for i, x in enumerate(inputs)])
    gradient = torch.func.grad(lambda x: functions[0](x).sum())
    torch.testing.assert_close(torch.func.vmap(gradient)(x), torch.stack([gradient(y) for y in x]), **CLOSE)


@pytest.mark.parametrize(
    ("loss", "tensors"),
    [(losses.dpo, 4), (losses.ipo, 4), (losses.orpo, 2), (losses.simpo, 2)],
    ids=["dpo", "ipo", "orpo", "simpo"],
)
def test_preference_losses_have_all_derivatives(loss: Loss, tensors: int) -> None:
    chosen, *rest = -torch.rand(tensors, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.1

    def f(x: Tensor) -> Tensor:
        return loss(x, *rest)

    gradient = torch.func.grad(lambda x: f(x).sum())(chosen)
    _, derivative = torch.func.jvp(f, (chosen,), (torch.ones_like(chosen),))
    torch.testing.assert_close(derivative, gradient, **CLOSE)  # each pair's loss depends on that pair only
    chosen.requires_grad_()
    assert torch.autograd.gradcheck(f, (chosen,))
    assert torch.autograd.gradgradcheck(f, (chosen,))


@LAYOUTS
def test_a_gradient_penalty_through_an_aggregation(layout: Callable[..., Any]) -> None:
    """d/dx |∇L|², where ∇L is that of a mean of means."""
    data = layout(batch())
    f, x = function_of(losses.sapo, data)
    cu_seqlens = data.get("cu_seqlens")

    def penalty(x: Tensor) -> Tensor:
        loss = seq_mean_token_mean(f(x), data["response_mask"], cu_seqlens)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return slope.square().sum()

    x.requires_grad_()
    assert penalty(x) > 0
    assert torch.autograd.gradcheck(penalty, (x,))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@EVERY
@LAYOUTS
def test_no_nan_is_made_in_backward_by_what_stands_outside_the_mask(name: str, layout: Callable[..., Any]) -> None:
    """``detect_anomaly`` stops at the first NaN gradient, also at one that a later selection would drop."""
    f, x = function_of(PER_TOKEN[name], layout(poison(batch())))
    with torch.autograd.detect_anomaly(check_nan=True):
        f(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@EVERY
@LAYOUTS
def test_a_loss_multiplied_in_place_has_its_gradient_multiplied(name: str, layout: Callable[..., Any]) -> None:
    """The losses once were saved for backward, so that writing to them changed the gradient or raised."""
    f, x = function_of(PER_TOKEN[name], layout(batch()))
    x.requires_grad_()
    weights = torch.linspace(0.5, 2, x[..., 0].numel() if f(x).shape != x.shape else x.numel(), dtype=x.dtype)
    weights = weights.view(f(x).shape)
    (want,) = torch.autograd.grad(f(x), x, weights)
    weighted = f(x)
    weighted *= weights
    (got,) = torch.autograd.grad(weighted.sum(), x)
    torch.testing.assert_close(got, want, **CLOSE)


@EVERY
def test_a_loss_overwritten_under_no_grad_keeps_its_gradient(name: str) -> None:
    """As for any result of torch that backward does not read: the graph records nothing of it."""
    f, x = function_of(PER_TOKEN[name], batch())
    x.requires_grad_()
    (want,) = torch.autograd.grad(f(x).sum(), x)
    overwritten = f(x)
    with torch.no_grad():
        overwritten.mul_(2)
    (got,) = torch.autograd.grad(overwritten.sum(), x)
    assert torch.equal(got, want)


@EVERY
def test_the_global_default_dtype_changes_nothing(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        f, x = function_of(PER_TOKEN[name], batch(dtype=dtype))
        want = f(x)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if dtype is torch.float32 else torch.bfloat16)
        try:
            got = f(x)
        finally:
            torch.set_default_dtype(before)
        assert got.dtype is dtype
        assert torch.equal(got, want)


@EVERY
def test_autocast_changes_nothing(name: str) -> None:
    f, x = function_of(PER_TOKEN[name], batch(dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        got = f(x)
    assert torch.equal(got, f(x))
