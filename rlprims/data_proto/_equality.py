"""Whether two values are the same, where NaN is the same as NaN and arrays may be anywhere inside."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.data_proto import _jagged
from rlprims.data_proto._columns import Array, dtype_text, shape_text


def difference(a: Tensor | Array, b: Tensor | Array) -> str | None:
    """Why two columns are not the same; None where they are."""
    if a is b:
        return None
    if isinstance(a, Tensor) != isinstance(b, Tensor):
        return "one is a tensor and the other a numpy array"
    if a.dtype != b.dtype and not (isinstance(a, np.ndarray) and a.dtype.kind == b.dtype.kind == "U"):  # type: ignore[union-attr]
        return f"dtype {dtype_text(a)} and {dtype_text(b)}"
    if shape_text(a) != shape_text(b):
        return f"shape {shape_text(a)} and {shape_text(b)}"
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensor_difference(a, b)
    assert isinstance(a, np.ndarray)
    assert isinstance(b, np.ndarray)
    return None if _same_arrays(a, b, frozenset()) else "the values differ"


def _tensor_difference(a: Tensor, b: Tensor) -> str | None:
    if a.device != b.device:
        return f"device {a.device} and {b.device}"
    if a.is_nested != b.is_nested:
        return "one is jagged and the other dense"
    if a.is_nested:
        one, two = _jagged.packed(a), _jagged.packed(b)
        if not torch.equal(one.offsets.diff(), two.offsets.diff()):
            return "the row lengths differ"
        a, b = one.values, two.values
    where = (a.data_ptr(), a.storage_offset(), a.stride(), a.is_conj(), a.is_neg())
    if a.data_ptr() != 0 and where == (b.data_ptr(), b.storage_offset(), b.stride(), b.is_conj(), b.is_neg()):
        return None  # the same memory: nothing to compare
    if torch.equal(a, b):
        return None
    unequal = a != b
    if a.is_floating_point() or a.is_complex():
        unequal &= ~(a.isnan() & b.isnan())
    count = int(unequal.sum())
    return f"{count} of {a.numel()} values differ" if count else None


def same(a: Any, b: Any, seen: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Deep equality. ``seen`` holds the pairs being compared further out, so that cycles end."""
    if a is b or (id(a), id(b)) in seen:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and difference(a, b) is None
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return (
            isinstance(a, np.ndarray)
            and isinstance(b, np.ndarray)
            and a.shape == b.shape
            and _same_arrays(a, b, seen | {(id(a), id(b))})
        )
    seen = seen | {(id(a), id(b))}
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key], seen) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(lambda x, y: same(x, y, seen), a, b))
    try:
        return bool(a == b) or bool(a != a and b != b)
    except (ValueError, TypeError, RuntimeError):
        return False  # an object that will not be compared is the same only as itself


def _same_arrays(a: Array, b: Array, seen: frozenset[tuple[int, int]]) -> bool:
    if a.dtype != object or b.dtype != object:
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc"))
    one, two = a.ravel().tolist(), b.ravel().tolist()
    try:
        if one == two:  # in C, by identity first: the usual case
            return True
    except (ValueError, TypeError, RuntimeError, RecursionError):
        pass  # a cell is an array or a cycle
    return all(map(lambda x, y: same(x, y, seen), one, two))
