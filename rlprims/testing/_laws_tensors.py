"""Laws of other kinds of tensors (subclasses, DTensors, masks of other bytes) and of global settings of torch."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rlprims.testing._call import Call, errors_break_the_law
from rlprims.testing._cases import LARGE, TOY
from rlprims.testing._compare import assert_close
from rlprims.testing._primitive import Primitive

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

EXACT = 1e-11


class Wrapped(Tensor):
    """A tensor without memory of its own, like quantized, sharded and traced tensors."""

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor) -> "Wrapped":
        made = Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), dtype=plain.dtype, device=plain.device
        )
        made.plain = plain
        assert isinstance(made, Wrapped)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda x: x.plain, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


def subclasses_pass_through(p: Primitive) -> None:
    """Wrapped tensors give wrapped tensors with the same values and gradients."""
    for call in p.few_samples():
        got = _converted(call, Wrapped, "wrapped tensors")
        for what, want in call.numbers().items():
            found = got[what]
            assert isinstance(found, Wrapped), f"{what} of wrapped tensors is a {type(found).__name__}"
            assert_close(f"{what} of wrapped tensors ({call.label})", found.plain, want, EXACT)


def replicated_tensors_work(p: Primitive) -> None:
    """DTensors with the whole batch on each rank give the same values and gradients."""
    from torch.distributed.tensor import Replicate

    _assert_distributed(p, Replicate())


def row_sharded_tensors_work(p: Primitive) -> None:
    """DTensors with some rows of a padded batch on each rank give the same values and gradients."""
    from torch.distributed.tensor import Shard

    _assert_distributed(p, Shard(0))


def any_nonzero_byte_is_true(p: Primitive) -> None:
    """A mask that is a view of bytes other than 0 and 1 gives the same result as one of 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    for call in p.samples():
        other = {
            name: (x * torch.randint(2, 256, x.shape, generator=generator)).to(torch.uint8).view(torch.bool)
            for name, x in call.data.items()
            if x.dtype is torch.bool
        }
        cotangent = call.cotangent()
        got, want = call.numbers(data=call.data | other, cotangent=cotangent), call.numbers(cotangent=cotangent)
        _assert_same_bits(got, want, f"of masks of other bytes than 0 and 1 ({call.label})")


def settings_of_torch_change_nothing(p: Primitive) -> None:
    """torch.set_default_dtype and torch.autocast change neither a bit nor the dtype of the result."""
    for layout in p.layouts:
        call = p.sample(*TOY, layout=layout)
        floats = {name: x.float() for name, x in call.data.items() if x.is_floating_point()}
        call = replace(call, data={**call.data, **floats})
        cotangent = call.cotangent()
        want = call.numbers(cotangent=cotangent)
        for what, setting in (
            ("a default dtype of float64", _default_dtype(torch.float64)),
            ("a default dtype of bfloat16", _default_dtype(torch.bfloat16)),
            ("autocast to bfloat16", torch.autocast("cpu", torch.bfloat16)),
        ):
            with setting:
                got = call.numbers(cotangent=cotangent)
            _assert_same_bits(got, want, f"under {what} ({call.label})")


def _assert_same_bits(got: dict[str, Tensor], want: dict[str, Tensor], of: str) -> None:
    for what, x in want.items():
        assert got[what].dtype is x.dtype, f"{what} {of} is {got[what].dtype}, expected {x.dtype}"
        assert_close(f"{what} {of}", got[what], x, 0)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _converted(call: Call, convert: Callable[[Tensor], Tensor], what: str) -> dict[str, Tensor]:
    """Value and gradients for converted tensors."""
    with errors_break_the_law(f"with {what} ({call.label}) it raised"):
        return call.numbers(data={name: convert(x) for name, x in call.data.items()})


def _assert_distributed(p: Primitive, placement: "Placement") -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    with _mesh() as mesh, warnings.catch_warnings(action="ignore"):
        for size in (TOY, LARGE):
            call = p.sample(*size)
            # A tensor that the function creates, such as the column numbers, is the same on every rank.
            with implicit_replication():
                got = _converted(call, lambda x: distribute_tensor(x, mesh, [placement]), f"DTensors, {placement},")
            for what, want in call.numbers().items():
                found = got[what]
                assert isinstance(found, DTensor), f"{what} of DTensors is a {type(found).__name__}"
                assert_close(f"{what} of DTensors ({call.label}, {placement})", found.full_tensor(), want, EXACT)


@contextmanager
def _mesh() -> "Iterator[DeviceMesh]":
    """A mesh of the existing process group, or of this process only."""
    from torch.distributed.device_mesh import init_device_mesh

    with nullcontext() if dist.is_initialized() else _single_process_group():
        yield init_device_mesh("cpu", (dist.get_world_size(),))


@contextmanager
def _single_process_group() -> Iterator[None]:
    """A process group of one process. Its store is in memory, so no other process can join."""
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
