"""Laws of every primitive: precision, gradients, and a pure function (no side effects, no shared memory)."""

import random
from functools import partial

import torch
from torch import Tensor

from rlprims.testing._call import errors_break_the_law
from rlprims.testing._cases import LARGE, Batch, make_batch, make_batches
from rlprims.testing._compare import assert_close, assert_derivative, assert_same
from rlprims.testing._primitive import Primitive

FLOAT32 = 2e-5
EXACT = 1e-12
SEEDS = (0, 1)


def float32_whatever_comes_in(p: Primitive) -> None:
    """bf16, fp16 and float32 are computed in float32: the result is float32 and close to the float64 one."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for batch in make_batches(SEEDS, dtype):
            for names in p.variants:
                got, want = p.run(batch, names), p.run(batch.to(torch.float64), names)
                for name, gradient in got.gradients.items() if dtype is torch.float32 else ():
                    assert_close(f"the gradient of {name} in float32", gradient.double(), want.gradients[name], FLOAT32)
                if got.value.is_floating_point():
                    assert got.value.dtype is torch.float32, f"{dtype} in gives {got.value.dtype}, expected float32"
                assert_close(f"the value of {dtype} inputs", got.value, want.value.to(got.value.dtype), FLOAT32)


def float64_stays(p: Primitive) -> None:
    """float64 inputs give a float64 result."""
    batch = make_batch(0)
    if not any(batch.data[name].is_floating_point() for name in p.required):
        return
    value = p.run(batch, p.required).value
    assert value.dtype in (torch.float64, torch.bool), f"float64 in gives {value.dtype}"


def gradient_is_the_derivative(p: Primitive) -> None:
    """gradcheck in float64, padded and packed, for each input that the loss is differentiated by."""
    packed = [make_batch(1).pack()] if "response_mask" in p.data else []
    for batch in (make_batch(0), *packed, make_batch(0, torch.float64, *LARGE)):
        for name in (name for name in p.differentiable if name in p.inputs):
            call = partial(_with, p, batch, name)
            assert_derivative(f"the gradient of {name}", call, batch.data[name], fast=batch.mask.shape == LARGE)


def _with(p: Primitive, batch: Batch, name: str, x: Tensor) -> Tensor:
    value: Tensor = p.call(batch.replace(**{name: x}), p.required)
    return value


def constants_get_no_gradient(p: Primitive) -> None:
    """Old and reference log-probs, advantages, returns and rewards get no gradient, even if they require one."""
    batch, names = make_batch(0, torch.float64, *LARGE), p.variants[-1]
    floats = [name for name in names if batch.data[name].is_floating_point() and name not in p.differentiable]
    constant = [name for name in floats if p.differentiable or name.endswith("log_probs")]
    leaves = {name: batch.data[name].clone().requires_grad_() for name in (*constant, *p.differentiable)}
    value = p.call(batch.replace(**leaves), names)
    if not constant or not value.requires_grad:
        return
    found = torch.autograd.grad(value.sum(), [leaves[name] for name in constant], allow_unused=True)
    for name, gradient in zip(constant, found, strict=True):
        reached = gradient is not None and bool((gradient != 0).any())
        assert not reached, f"a gradient reaches {name}, up to {0 if gradient is None else gradient.abs().max():.3g}"


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.uint8)


def inputs_are_untouched(p: Primitive) -> None:
    """No argument is written to, and no result is a view of one."""
    for dtype in (torch.float32, torch.float64):
        large = make_batch(0, dtype, *LARGE)
        for batch in (make_batch(0, dtype), large, *([large.pack()] if "response_mask" in p.data else [])):
            names = p.variants[-1]
            before = {name: _bits(batch.data[name].clone()) for name in names}
            value = p.call(batch, names)
            for name in names:
                assert torch.equal(_bits(batch.data[name]), before[name]), f"{name} was written to"
                shared = value.untyped_storage().data_ptr() == batch.data[name].untyped_storage().data_ptr()
                assert not shared, f"the result shares its storage with {name}"


def strides_do_not_matter(p: Primitive) -> None:
    """Transposed, strided and expanded inputs give the same numbers."""
    for batch in make_batches([0]):
        strided = batch.map(
            lambda x: torch.stack([x, x], dim=-1).transpose(0, 1).contiguous().transpose(0, 1)[..., 0],
            lambda x: torch.stack([x, x], dim=-1)[..., 0],
        )
        names = p.variants[-1]
        assert_same(p.run(strided, names), p.run(batch, names), EXACT, " of non-contiguous inputs")


def no_global_randomness(p: Primitive) -> None:
    """Global generators are not used, and a second call gives the same bits."""
    batch, names = make_batch(0, torch.float64, *LARGE), p.variants[-1]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    first = p.run(batch, names)
    assert torch.equal(torch.get_rng_state(), torch_state), "torch's global generator was used"
    assert random.getstate() == python_state, "random's global generator was used"
    torch.rand(3)
    second = p.run(batch, names)
    torch.set_rng_state(torch_state)
    assert_same(second, first, 0, " of a second call")


def no_value_is_read_by_the_host(p: Primitive) -> None:
    """It runs on the meta device, with shapes only: no .item(), no branch on a value, no tensor on another device."""
    names = p.variants[-1]
    for batch in (make_batch(0), *([make_batch(0).pack()] if "response_mask" in p.data else [])):
        with errors_break_the_law("without values it raised"):
            value = p.call(batch.on("meta"), names)
        assert value.device.type == "meta", f"inputs on meta give a result on {value.device}"
