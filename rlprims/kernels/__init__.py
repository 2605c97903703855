"""Triton kernels behind some of the maths: the same numbers in one pass over an accelerator's memory.

They run where ``RLPRIMS_KERNELS`` or a :func:`using` block says so: "auto", the default, takes them for CUDA tensors if
Triton is installed (torch's CUDA builds bring it, else ``rlprims[triton]``); "never" takes none; "always" takes them
unchecked, also in Triton's interpreter on a CPU (``TRITON_INTERPRET=1``).

**A kernel is taken by "auto" only where it was seen to be right.** Its first use on a device in a dtype runs it on a
small fixed probe, beside numbers made by plain torch or by hand. If it does not compile there, or a number differs by
more than ``TOLERANCE``, a warning says so, once, and the plain formula computes in its place until the process ends.

What asks a kernel keeps its plain formula, which also runs where gradients of the second order or a compiler need it.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["TOLERANCE", "chosen", "using"]

Name: TypeAlias = Literal["clipped", "scan", "softmax"]
When: TypeAlias = Literal["auto", "always", "never"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""How far a kernel may be from its probe's numbers, of 1 + their size, by the dtype of what it gives.

Roundings stay several times below it; a formula that is wrong does not.
"""

_AUTO_DEVICES = ("cuda",)
_WHEN: ContextVar[str | None] = ContextVar("rlprims.kernels", default=None)


@contextmanager
def using(when: When) -> Iterator[None]:
    """Within the block: "auto" (CUDA tensors, kernels that pass their probe), "always" or "never".

    >>> with using("never"):
    ...     chosen("scan", torch.zeros(2))
    False
    """
    token = _WHEN.set(when)
    try:
        yield
    finally:
        _WHEN.reset(token)


def chosen(name: Name, *tensors: Tensor) -> bool:
    """Whether that kernel computes on these tensors.

    Raises:
        ValueError: neither "auto", "always" nor "never" is set.
    """
    if torch.compiler.is_compiling():  # which makes kernels of its own
        return False
    when = _WHEN.get() or os.environ.get("RLPRIMS_KERNELS", "auto")
    if when not in ("auto", "always", "never"):
        raise ValueError(f"RLPRIMS_KERNELS={when!r}: choose 'auto', 'always' or 'never'")
    if when == "never" or not all(x.numel() and not x.is_meta for x in tensors):
        return False
    first = tensors[0]
    return when == "always" or (first.device.type in _AUTO_DEVICES and _right(name, first.device, first.dtype))


@cache
def _right(name: Name, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is there and the kernel passes its probe."""
    if find_spec("triton") is None:
        return False
    try:
        with torch.no_grad():
            for got, want in import_module(f"rlprims.kernels._{name}").probe(device, dtype):
                tolerance = TOLERANCE[got.dtype]
                torch.testing.assert_close(got.cpu().double(), want.double(), rtol=tolerance, atol=tolerance)
    except Exception as error:  # of a compiler, a driver or a device: whatever it is, the formula computes
        warnings.warn(
            f"kernel {name!r} is off for {dtype} on {device}: on its probe it "
            f"{'differs' if isinstance(error, AssertionError) else 'fails'}. The plain formula computes in its place, "
            "as right and slower. Please report this. RLPRIMS_KERNELS=never silences it, "
            f"RLPRIMS_KERNELS=always takes the kernel all the same.\n{type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True
