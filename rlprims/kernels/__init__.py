"""Triton kernels behind some of the maths: the same numbers in one pass over an accelerator's memory.

They run where ``RLPRIMS_KERNELS`` or a :func:`using` block says so: "auto" takes them for CUDA tensors if Triton is
installed (extra ``rlprims[triton]``); "always" is for tests, and needs Triton's interpreter on a CPU
(``TRITON_INTERPRET=1``). The default is "never", as no GPU has run them yet. What asks a kernel keeps its plain
formula, which is the oracle, and which runs wherever gradients of the second order or a compiler need it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["chosen", "using"]

When: TypeAlias = Literal["auto", "always", "never"]

_WHEN: ContextVar[str | None] = ContextVar("rlprims.kernels", default=None)


@contextmanager
def using(when: When) -> Iterator[None]:
    """Within the block: "auto" (CUDA tensors, if Triton is installed), "always" or "never".

    >>> with using("never"):
    ...     chosen(torch.zeros(2))
    False
    """
    token = _WHEN.set(when)
    try:
        yield
    finally:
        _WHEN.reset(token)


def chosen(*tensors: Tensor) -> bool:
    """Whether kernels compute on these tensors.

    Raises:
        ValueError: neither "auto", "always" nor "never" is set.
    """
    if torch.compiler.is_compiling():  # which makes kernels of its own
        return False
    when = _WHEN.get() or os.environ.get("RLPRIMS_KERNELS", "never")
    if when not in ("auto", "always", "never"):
        raise ValueError(f"RLPRIMS_KERNELS={when!r}: choose 'auto', 'always' or 'never'")
    if when == "never" or not all(x.numel() and not x.is_meta for x in tensors):
        return False
    return when == "always" or (tensors[0].is_cuda and _installed())


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
