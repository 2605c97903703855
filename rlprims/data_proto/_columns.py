"""Operations on columns of three kinds: dense tensors, jagged tensors and numpy arrays.

A column has one entry per row along its first dimension. Dense and jagged rows that are contiguous are views. Numpy
columns are always copied (an object array is only pointers), so that a write to one result does not change another.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlprims.data_proto import _jagged
from rlprims.data_proto._errors import BatchError, names

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def object_array(cells: Sequence[Any]) -> Array:
    """An object array with one cell per row, for cells of any type.

    ``np.array(cells, dtype=object)`` would make a second dimension from lists of equal length, and an array of pixels
    from one image per row.
    """
    return np.fromiter(cells, dtype=object, count=len(cells))


def is_column(value: Any) -> bool:
    """Whether a value has rows: a tensor or array with a dimension, or a list or tuple."""
    return isinstance(value, list | tuple) or (isinstance(value, Tensor | np.ndarray) and value.ndim > 0)


def shape_text(column: Tensor | Array) -> str:
    if isinstance(column, Tensor) and column.is_nested:
        sizes = ["*" if isinstance(size, torch.SymInt) else str(size) for size in column.shape]
    else:
        sizes = [str(size) for size in column.shape]
    return "(" + ", ".join(sizes) + ("," if len(sizes) == 1 else "") + ")"


def dtype_text(column: Tensor | Array) -> str:
    return str(column.dtype).removeprefix("torch.")


def byte_count(column: Tensor | Array) -> int:
    """The bytes of the numbers; for an object column, those of its pointers and of the arrays and tensors in it."""
    if isinstance(column, Tensor):
        flat = _jagged.components(column).values if column.is_nested else column
        return flat.numel() * flat.element_size()
    in_cells = sum(getattr(cell, "nbytes", 0) for cell in column.flat) if column.dtype == object else 0
    return column.nbytes + in_cells


def row(tensor: Tensor, index: int) -> Tensor:
    return _jagged.row(tensor, index) if tensor.is_nested else tensor[index]


def narrow(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Rows start to stop, as a view."""
    return _jagged.narrow(tensor, start, stop) if tensor.is_nested else tensor[start:stop]


def take(tensor: Tensor, rows: Tensor) -> Tensor:
    """The rows in this order, copied once. ``rows`` is int64 and not negative."""
    if tensor.is_nested:
        return _jagged.take(tensor, rows)
    return tensor.index_select(0, rows.to(tensor.device))


def join(name: str, columns: Sequence[Tensor]) -> Tensor:
    """The columns concatenated along the rows, copied once."""
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
    return _jagged.from_components(_jagged.Parts(values, _jagged.offsets_of_joined(parts), None, dim))


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


class Columns(NamedTuple):
    """All columns of a batch. ``rows`` is None if there is no column and no ``batch``, not even an empty one."""

    tensors: dict[str, Tensor]
    arrays: dict[str, Array]
    rows: int | None

    def narrow(self, start: int, stop: int) -> Self:
        """Rows start to stop: views of the tensors."""
        return self._replace(
            tensors={name: narrow(tensor, start, stop) for name, tensor in self.tensors.items()},
            arrays={name: array[start:stop].copy() for name, array in self.arrays.items()},
            rows=None if self.rows is None else stop - start,
        )

    def take(self, numbers: Tensor) -> Self:
        """The rows with these numbers (int64, on the CPU, from 0), in new memory."""
        return self._replace(
            tensors={name: take(tensor, numbers) for name, tensor in self.tensors.items()},
            arrays={name: array[numbers.numpy()] for name, array in self.arrays.items()},
            rows=None if self.rows is None else numbers.numel(),
        )

    def extended(self, numbers: Tensor) -> Self:
        """All rows, followed by the rows with these numbers: one copy of everything."""
        return self._replace(
            tensors={name: join(name, [tensor, take(tensor, numbers)]) for name, tensor in self.tensors.items()},
            arrays={name: np.concatenate([array, array[numbers.numpy()]]) for name, array in self.arrays.items()},
            rows=(self.rows or 0) + numbers.numel(),
        )

    def by_name(self) -> dict[str, Tensor | Array]:
        return {**self.tensors, **self.arrays}

    def copied_arrays(self) -> Self:
        """The same tensors, with copies of the arrays."""
        return self._replace(arrays={name: array.copy() for name, array in self.arrays.items()})


def joined(parts: Sequence[Columns]) -> Columns:
    """The columns of all parts, which have the same names, concatenated along the rows."""
    first, counts = parts[0], [part.rows for part in parts if part.rows is not None]
    return Columns(
        {name: join(name, [part.tensors[name] for part in parts]) for name in first.tensors},
        {name: join_arrays(name, [part.arrays[name] for part in parts]) for name in first.arrays},
        sum(counts) if counts else None,
    )


def check_tensor(name: str, tensor: Any) -> None:
    """Raise a BatchError unless the value is a tensor with rows, dense or jagged."""
    if not isinstance(tensor, Tensor):
        raise BatchError(
            f"batch[{name!r}] is {type(tensor).__name__}, expected a tensor; numpy arrays and lists belong in "
            "non_tensor_batch, other objects in meta_info; flatten a nested TensorDict with flatten_keys('.')"
        )
    if tensor.ndim == 0:
        raise BatchError(f"batch[{name!r}] has no rows: it is a scalar; keep it in meta_info")
    if tensor.is_nested and tensor.layout != torch.jagged:
        raise BatchError(
            f"batch[{name!r}] is a nested tensor of layout {tensor.layout}, expected torch.jagged; build it with "
            "torch.nested.nested_tensor(..., layout=torch.jagged)"
        )


def as_array(name: str, value: Any) -> Array:
    """A value of ``non_tensor_batch`` as it is stored: an array unchanged, a list as one object per row."""
    if isinstance(value, np.ndarray) and value.ndim:
        return value
    if not is_column(value) or isinstance(value, Tensor):
        raise BatchError(
            f"non_tensor_batch[{name!r}] is {type(value).__name__}, expected a numpy array or a list with one entry "
            "per row; tensors belong in batch, values of the whole batch in meta_info"
        )
    return object_array(value)


def common_rows(tensors: Mapping[str, Tensor], arrays: Mapping[str, Array], batch: Any = None) -> int | None:
    """The number of rows that all columns have; None if there is no column."""
    if not tensors.keys().isdisjoint(arrays):
        twice = sorted(tensors.keys() & arrays.keys())
        raise BatchError(f"batch and non_tensor_batch both have {names(twice)}; rename or drop one of each")
    counts = {column.shape[0] for part in (tensors, arrays) for column in part.values()}
    if batch is not None:
        counts.add(batch.batch_size[0])
    if len(counts) > 1:
        named = {name: column.shape[0] for part in (tensors, arrays) for name, column in part.items()}
        named |= {} if batch is None else {"batch_size": batch.batch_size[0]}
        raise BatchError(f"fields have different numbers of rows: {named}; give every field one entry per row")
    return counts.pop() if counts else None


def batch_of(tensors: Mapping[str, Tensor], rows: int, device: Any = None) -> TensorDict:
    return TensorDict(dict(tensors), batch_size=torch.Size([rows]), device=device)
