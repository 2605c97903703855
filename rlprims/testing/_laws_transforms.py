"""Laws of ``torch.func`` and second derivatives: each transform gives the same numbers as separate plain calls."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from rlprims.testing._call import SHARED, Call, gradients_of, random_like
from rlprims.testing._cases import LARGE, TOY
from rlprims.testing._compare import assert_close
from rlprims.testing._primitive import Primitive

EXACT = 1e-11
COPIES = 3

T = TypeVar("T")
Tensors = dict[str, Tensor]


def func_grad_is_autograd(p: Primitive) -> None:
    """torch.func.grad gives the gradients of autograd."""
    for call in p.samples():
        cotangent = call.cotangent()
        got = torch.func.grad(_product(call, cotangent))(call.point)
        _assert_equal(f"torch.func.grad ({call.label}) of", got, call.gradients(cotangent))


def jvp_is_the_transpose_of_grad(p: Primitive) -> None:
    """⟨u, J v⟩ of torch.func.jvp is ⟨Jᵀ u, v⟩ of autograd, for random u and v."""
    for call in p.samples():
        cotangent, direction = call.cotangent(), _direction(call)
        tangent: Tensor = torch.func.jvp(call, (call.point,), (direction,))[1]
        want = _dot(call.gradients(cotangent), direction)
        assert_close(f"⟨u, J v⟩ of torch.func.jvp ({call.label})", (cotangent * tangent).sum(), want, EXACT)


def vmap_is_a_loop(p: Primitive) -> None:
    """torch.vmap over stacked batches gives the values of each."""
    for calls in _batches_to_stack(p):
        got = _vmap(calls[0], calls)
        assert_close(f"the value under vmap ({calls[0].label})", got, torch.stack([call() for call in calls]), EXACT)


def vmap_of_grad_is_a_loop(p: Primitive) -> None:
    """torch.vmap(torch.func.grad) gives the gradients of each batch."""
    for calls in _batches_to_stack(p):
        cotangent = calls[0].cotangent()
        got = _vmap(partial(_gradients, calls[0], cotangent), calls)
        each = [call.gradients(cotangent) for call in calls]
        want = {name: torch.stack([g[name] for g in each]) for name in calls[0].inputs}
        _assert_equal(f"vmap(grad) ({calls[0].label}) of", got, want)


def _batches_to_stack(p: Primitive) -> Iterator[list[Call]]:
    for size in (TOY, LARGE):
        for layout in p.layouts:
            yield [p.sample(*size, seed=seed, layout=layout) for seed in range(COPIES)]


def gradients_have_gradients(p: Primitive) -> None:
    """A gradient made with create_graph=True has the gradient that torch.func.jvp of torch.func.grad has."""
    for call in p.samples():
        cotangent, direction = call.cotangent(), _direction(call)
        leaves = {name: x.clone().requires_grad_() for name, x in call.point.items()}
        product = _dot(gradients_of(call(leaves), leaves, cotangent, create_graph=True), direction)
        want: Tensors = torch.func.jvp(torch.func.grad(_product(call, cotangent)), (call.point,), (direction,))[1]
        _assert_equal(f"the second derivative ({call.label}) by", gradients_of(product, leaves), want, 10 * EXACT)


def second_derivative_is_right(p: Primitive) -> None:
    """gradgradcheck in float64, in random directions, at both sizes."""
    for layout in p.layouts:
        _assert_second_derivative(p.sample(*TOY, layout=layout), fast=True)
    _assert_second_derivative(p.sample(*LARGE), fast=True)


def every_second_derivative_is_right(p: Primitive) -> None:
    """gradgradcheck in float64, entry by entry."""
    for layout in p.layouts:
        _assert_second_derivative(p.sample(*TOY, layout=layout), fast=False)


def _assert_second_derivative(call: Call, fast: bool) -> None:
    names = list(call.inputs)
    if not call({name: x.clone().requires_grad_() for name, x in call.point.items()}).requires_grad:
        return

    def value(*inputs: Tensor) -> Tensor:
        return call(dict(zip(names, inputs, strict=True)))

    leaves = [call.data[name].clone().requires_grad_() for name in names]
    cotangent = call.cotangent().requires_grad_()
    try:
        torch.autograd.gradgradcheck(value, leaves, cotangent, fast_mode=fast, atol=1e-4)
    except GradcheckError as error:
        lines = " ".join(str(error).split())
        raise AssertionError(f"gradgradcheck ({call.label}) by {', '.join(names)}: {lines[:200]}") from error


def _product(call: Call, cotangent: Tensor, data: Tensors | None = None) -> Callable[[Tensors], Tensor]:
    """The product of value and cotangent, as a function of the inputs."""
    return lambda point: (call({**(data or {}), **point}) * cotangent).sum()


def _gradients(call: Call, cotangent: Tensor, data: Tensors) -> Tensors:
    """The gradients by torch.func.grad at these data."""
    rest = {name: x for name, x in data.items() if name not in call.inputs}
    gradients: Tensors = torch.func.grad(_product(call, cotangent, rest))({name: data[name] for name in call.inputs})
    return gradients


def _direction(call: Call) -> Tensors:
    return {name: random_like(x, seed=2 + i) for i, (name, x) in enumerate(call.point.items())}


def _dot(gradients: Tensors, direction: Tensors) -> Tensor:
    products = [(g * direction[name]).sum() for name, g in gradients.items()]
    return torch.stack(products).sum() if products else torch.zeros((), dtype=torch.float64)


def _vmap(fn: Callable[[Tensors], T], calls: list[Call]) -> T:
    """torch.vmap over the data that differ between the calls."""
    stacked = {
        name: x if name == SHARED else torch.stack([call.data[name] for call in calls])
        for name, x in calls[0].data.items()
    }
    in_dims = ({name: None if name == SHARED else 0 for name in stacked},)
    value: T = torch.vmap(fn, in_dims=in_dims)(stacked)
    return value


def _assert_equal(what: str, got: Tensors, want: Tensors, tolerance: float = EXACT) -> None:
    for name, x in want.items():
        assert_close(f"{what} {name}", got[name], x, tolerance)
