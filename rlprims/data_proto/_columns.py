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
from rlprims.masking import empty_like

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
    rows = rows.to(tensor.device)
    if tensor.requires_grad:
        return tensor.index_select(0, rows)
    taken = empty_like(tensor, tensor.dtype, (len(rows), *tensor.shape[1:]))
    return torch.index_select(tensor, 0, rows, out=taken)


def repeated(tensor: Tensor, times: int, interleave: bool) -> Tensor:
    """All rows so many times, copied once: a plain copy, a quarter faster than a gather."""
    rows = tensor.shape[0]
    if tensor.is_nested:
        numbers = torch.arange(rows, device="cpu")
        return take(tensor, numbers.repeat_interleave(times) if interleave else numbers.repeat(times))
    dim, sizes = (1, (rows, times)) if interleave else (0, (times, rows))
    # Not reshape: of one row it would make rows that share their memory.
    shape, several = (rows * times, *tensor.shape[1:]), tensor.unsqueeze(dim).expand(*sizes, *tensor.shape[1:])
    if tensor.requires_grad:
        return several.contiguous().view(shape)
    repeats = empty_like(tensor, tensor.dtype, shape)
    repeats.view(several.shape).copy_(several)
    return repeats


def join(name: str, columns: Sequence[Tensor]) -> Tensor:
    """The columns one under another. Adjacent views of one memory become one view, without a copy."""
    view = _rejoined(columns)
    if view is not None:
        return view
    kinds = {(column.is_nested, column.dtype, column.device) for column in columns}
    if len(kinds) > 1:
        found = sorted({f"{dtype_text(c)} {c.layout} on {c.device}" for c in columns})
        raise BatchError(f"concat: {name} has different kinds: {found}; convert them to one first")
    if not columns[0].is_nested:
        _same_shape(name, [tuple(column.shape[1:]) for column in columns])
        if any(column.requires_grad for column in columns):
            return torch.cat(list(columns))
        rows = sum(map(row_count, columns))
        return torch.cat(list(columns), out=empty_like(columns[0], columns[0].dtype, (rows, *columns[0].shape[1:])))
    parts = [_jagged.packed(column) for column in columns]
    _same_shape(name, [tuple("*" if isinstance(s, torch.SymInt) else s for s in c.shape[1:]) for c in columns])
    dim, flat = parts[0].dim, [part.values for part in parts]
    values = _rejoined(flat) if dim == 1 else None
    values = torch.cat(flat, dim - 1) if values is None else values
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


def _rejoined(parts: Sequence[Tensor]) -> Tensor | None:
    """One view of all rows, if the parts are alike and each begins in memory where the one before it ends."""
    # Wrapper tensors have no memory of their own, and those of a graph would lose the later parts' gradients.
    if any(type(part) is not Tensor or part.requires_grad or part.is_conj() or part.is_neg() for part in parts):
        return None
    first = next((part for part in parts if part.numel()), None)
    if first is None:
        return None
    dtype, inner, stride, width = first.dtype, list(first.shape[1:]), first.stride(), first.element_size()
    rows, here = 0, first.data_ptr()
    for part in parts:
        count, *others = part.shape
        if part.dtype != dtype or others != inner:
            return None
        if (part.data_ptr() != here or part.stride() != stride) if count else part.device != first.device:
            return None
        rows += count
        here += count * stride[0] * width
    size, memory = (rows, *inner), first.untyped_storage()
    end = first.data_ptr() + width * (1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)))
    # Two allocations may lie side by side: only rows in the memory that the first part holds are one view.
    if end > memory.data_ptr() + memory.nbytes():
        return None
    return first.as_strided(size, stride, first.storage_offset())
