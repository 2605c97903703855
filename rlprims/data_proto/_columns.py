"""What a column can do, whichever of three kinds it is: a dense tensor, a jagged tensor, or a numpy array.

A column has one entry per row along its first dimension. Dense and jagged rows that are contiguous are views; numpy
columns are always copied (an object array is only pointers), so that a write to one result reaches no other.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rlprims.data_proto import _jagged
from rlprims.data_proto._errors import BatchError

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def object_array(cells: Sequence[Any]) -> Array:
    """One cell per row, whatever the cells are.

    ``np.array(cells, dtype=object)`` would make two dimensions of lists that happen to be equally long, and an image
    per row into an array of pixels.
    """
    return np.fromiter(cells, dtype=object, count=len(cells))


def is_column(value: Any) -> bool:
    """Whether a value has rows: a tensor or array with a dimension, or a list or tuple."""
    return isinstance(value, list | tuple) or (isinstance(value, Tensor | np.ndarray) and value.ndim > 0)


def row_count(column: Tensor | Array) -> int:
    return int(column.shape[0])


def shape_text(column: Tensor | Array) -> str:
    if isinstance(column, Tensor) and column.is_nested:
        sizes = ["*" if isinstance(size, torch.SymInt) else str(size) for size in column.shape]
    else:
        sizes = [str(size) for size in column.shape]
    return "(" + ", ".join(sizes) + ("," if len(sizes) == 1 else "") + ")"


def dtype_text(column: Tensor | Array) -> str:
    return str(column.dtype).removeprefix("torch.")


def byte_count(column: Tensor | Array) -> int:
    """Bytes of the numbers; of an object column, of its pointers and of the arrays and tensors in it."""
    if isinstance(column, Tensor):
        flat = _jagged.apart(column).values if column.is_nested else column
        return flat.numel() * flat.element_size()
    held = sum(getattr(cell, "nbytes", 0) for cell in column.flat) if column.dtype == object else 0
    return column.nbytes + held


def row(tensor: Tensor, index: int) -> Tensor:
    return _jagged.row(tensor, index) if tensor.is_nested else tensor[index]


def narrow(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Rows start to stop, as a view."""
    return _jagged.narrow(tensor, start, stop) if tensor.is_nested else tensor[start:stop]


def take(tensor: Tensor, rows: Tensor) -> Tensor:
    """The rows in this order, copied once. ``rows`` is int64, none negative."""
    if tensor.is_nested:
        return _jagged.take(tensor, rows)
    return tensor.index_select(0, rows.to(tensor.device))


def join(name: str, columns: Sequence[Tensor]) -> Tensor:
    """The columns one under another, copied once."""
    kinds = {(column.is_nested, column.dtype, column.device) for column in columns}
    if len(kinds) > 1:
        found = sorted({f"{dtype_text(c)} {c.layout} on {c.device}" for c in columns})
        raise BatchError(f"concat: {name} has different kinds: {found}; convert them to one first")
    if not columns[0].is_nested:
        _same_shape(name, [tuple(column.shape[1:]) for column in columns])
        return torch.cat(list(columns))
    parts = [_jagged.packed(column) for column in columns]
    _same_shape(name, [tuple("*" if isinstance(s, torch.SymInt) else s for s in c.shape[1:]) for c in columns])
    dim = parts[0].dim
    values = torch.cat([part.values for part in parts], dim - 1)
    return _jagged.together(_jagged.Parts(values, _jagged.offsets_of_joined(parts), None, dim))


def join_arrays(name: str, arrays: Sequence[Array]) -> Array:
    kinds = {array.dtype.kind if array.dtype.kind in "US" else array.dtype for array in arrays}
    if len(kinds) > 1:
        found = sorted({str(array.dtype) for array in arrays})
        raise BatchError(f"concat: {name} has different dtypes: {found}; convert them to one with astype first")
    _same_shape(name, [array.shape[1:] for array in arrays])
    return np.concatenate(arrays)


def _same_shape(name: str, row_shapes: Sequence[tuple[Any, ...]]) -> None:
    if len(set(row_shapes)) > 1:
        raise BatchError(
            f"concat: rows of {name} have different shapes: {sorted(set(row_shapes), key=str)}; "
            "pad them to one shape, or make the column a jagged nested tensor"
        )
