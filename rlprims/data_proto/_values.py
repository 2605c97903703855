"""Values of ``meta_info`` and columns: deep copies, equality, and merging the ``meta_info`` of several workers."""

import copy
from collections.abc import Mapping
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.data_proto._columns import Array, Jagged, dtype_text, shape_text

_IMMUTABLE = frozenset({NoneType, bool, int, float, complex, str, bytes})


def copied(value: Any) -> Any:
    """A deep copy of containers, arrays and tensors: changes of the copy do not change the original."""
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(copied(item) for item in value)
    if isinstance(value, Tensor):
        return value.clone()  # deepcopy refuses a tensor in a graph
    try:
        return copy.deepcopy(value)
    except Exception:  # a lock, a socket, a generator: it cannot be copied
        return value


def difference(a: Tensor | Array, b: Tensor | Array) -> str | None:
    """The difference between two columns, as text; None if they are equal. NaN counts as equal to NaN."""
    if a is b:
        return None
    if isinstance(a, Tensor) != isinstance(b, Tensor):
        return "one is a tensor and the other a numpy array"
    strings = isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype.kind == b.dtype.kind == "U"
    if a.dtype != b.dtype and not strings:  # strings may have different widths
        return f"dtype {dtype_text(a)} and {dtype_text(b)}"
    if shape_text(a.shape) != shape_text(b.shape):
        return f"shape {shape_text(a.shape)} and {shape_text(b.shape)}"
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensor_difference(a, b)
    return None if _same_arrays(a, b, frozenset()) else "the values differ"


def _tensor_difference(a: Tensor, b: Tensor) -> str | None:
    if a.device != b.device:
        return f"device {a.device} and {b.device}"
    if a.is_nested != b.is_nested:
        return "one is jagged and the other dense"
    if a.is_nested:
        one, two = Jagged.packed(a), Jagged.packed(b)
        if not torch.equal(one.offsets.diff(), two.offsets.diff()):
            return "the row lengths differ"
        a, b = one.values, two.values
    memory = [(t.data_ptr(), t.storage_offset(), t.stride(), t.is_conj(), t.is_neg()) for t in (a, b)]
    if (a.data_ptr() != 0 and memory[0] == memory[1]) or torch.equal(a, b):
        return None
    unequal = a != b
    if a.is_floating_point() or a.is_complex():
        unequal &= ~(a.isnan() & b.isnan())
    count = int(unequal.sum())
    return f"{count} of {a.numel()} values differ" if count else None


def same(a: Any, b: Any, seen: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Deep equality. ``seen`` holds the pairs that are being compared in outer calls, so that cycles end."""
    if a is b or (id(a), id(b)) in seen:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and difference(a, b) is None
    seen = seen | {(id(a), id(b))}
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        both = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        return both and a.shape == b.shape and _same_arrays(a, b, seen)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key], seen) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y, seen) for x, y in zip(a, b, strict=True))
    try:
        return bool(a == b) or bool(a != a and b != b)
    except (ValueError, TypeError, RuntimeError):
        return False  # an object that raises when it is compared is equal only to itself


def _same_arrays(a: Any, b: Any, seen: frozenset[tuple[int, int]]) -> bool:
    if a.dtype != object or b.dtype != object:
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc"))
    one, two = a.ravel().tolist(), b.ravel().tolist()
    # The usual case, in C. Not for lists: Python 3.13.0 crashes on comparing a list that contains itself.
    if {*map(type, one), *map(type, two)} <= _IMMUTABLE and one == two:
        return True
    return all(same(x, y, seen) for x, y in zip(one, two, strict=True))
