"""What a row is: folding rows into a dimension of longer rows, and taking it apart again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rlprims.data_proto import _columns
from rlprims.data_proto._columns import Array, object_array
from rlprims.data_proto._errors import BatchError
from rlprims.data_proto._parts import D, columns, derived, fields, missing
from rlprims.data_proto._rows import upto


def fold_batch_dim(data: D, new_batch_size: int) -> D:
    """Fewer, longer rows: a column (B, ...) becomes (new_batch_size, B / new_batch_size, ...).

    So the G samples of a prompt, one after another, become one row that is moved as one. Views where memory allows.

    Raises:
        BatchError: the rows do not divide, or a jagged field, whose rows have no common shape.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(4)}, {"uid": ["a", "a", "b", "b"]})
    >>> folded = data.fold_batch_dim(2)
    >>> folded["ids"].tolist(), folded["uid"].tolist()
    ([[0, 1], [2, 3]], [['a', 'a'], ['b', 'b']])
    >>> folded.unfold_batch_dim()["uid"].tolist()
    ['a', 'a', 'b', 'b']
    """
    tensors, arrays, rows = columns(data)
    if new_batch_size < 1 or (rows or 0) % new_batch_size:
        raise BatchError(
            f"fold_batch_dim: {rows} rows do not make {new_batch_size} equal rows; use "
            f"pad_to_divisor({new_batch_size}) first"
        )
    inner = (rows or 0) // new_batch_size
    return derived(
        data,
        {n: _dense(n, t, "fold_batch_dim").reshape(new_batch_size, inner, *t.shape[1:]) for n, t in tensors.items()},
        {name: array.reshape(new_batch_size, inner, *array.shape[1:]).copy() for name, array in arrays.items()},
        None if rows is None else new_batch_size,
    )


def unfold_batch_dim(data: D, batch_dims: int = 2) -> D:
    """Rows made of the first ``batch_dims`` dimensions of every column: the inverse of `fold_batch_dim`.

    Raises:
        BatchError: columns that do not share those dimensions.

    >>> from rlprims.data_proto import DataProto
    >>> DataProto.from_dict({"ids": torch.zeros(2, 3, 4)}).unfold_batch_dim()["ids"].shape
    torch.Size([6, 4])
    """
    tensors, arrays, rows = columns(data)
    for name, tensor in tensors.items():
        _dense(name, tensor, "unfold_batch_dim")
    leading = {name: tuple(c.shape[:batch_dims]) for part in (tensors, arrays) for name, c in part.items()}
    if batch_dims < 1 or len(set(leading.values())) > 1 or any(len(sizes) < batch_dims for sizes in leading.values()):
        raise BatchError(
            f"unfold_batch_dim: columns need the same first {batch_dims} dimensions, got {leading}; {fields(data)}"
        )
    sizes = next(iter(leading.values()), (rows or 0,))
    merged_rows = torch.Size(sizes).numel()
    return derived(
        data,
        {name: tensor.reshape(merged_rows, *tensor.shape[batch_dims:]) for name, tensor in tensors.items()},
        {name: array.reshape(merged_rows, *array.shape[batch_dims:]).copy() for name, array in arrays.items()},
        None if rows is None else merged_rows,
    )


def unfold_column_chunks(data: D, n_split: int, split_keys: Iterable[str] | None = None) -> D:
    """Rows cut into ``n_split`` rows: fields in ``split_keys`` along their second dimension, the others repeated.

    An object column in ``split_keys`` is cut along its second dimension if it has one, else cell by cell.

    Raises:
        MissingField: a split key that is no column.
        BatchError: a second dimension that does not divide, or a jagged field to split.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"pair": torch.tensor([[1, 2], [3, 4]])}, {"uid": ["a", "b"]})
    >>> cut = data.unfold_column_chunks(2, split_keys=["pair"])
    >>> cut["pair"].tolist(), cut["uid"].tolist()
    ([[1], [2], [3], [4]], ['a', 'a', 'b', 'b'])
    """
    tensors, arrays, rows = columns(data)
    keys = set(split_keys or ())
    for name in keys - tensors.keys() - arrays.keys():
        raise missing(data, name)
    if n_split < 1:
        raise BatchError(f"unfold_column_chunks: n_split is {n_split}, it needs to be at least 1")
    count = (rows or 0) * n_split
    numbers = upto(rows or 0).repeat_interleave(n_split)

    def tensor_rows(name: str, tensor: Tensor) -> Tensor:
        if name not in keys:
            return _columns.take(tensor, numbers)
        width = _divided(name, _dense(name, tensor, "unfold_column_chunks").shape[1:], n_split)
        return tensor.reshape(count, width, *tensor.shape[2:])

    def array_rows(name: str, array: Array) -> Array:
        if name not in keys:
            return array.repeat(n_split, axis=0)
        if array.ndim > 1:
            return array.reshape(count, _divided(name, array.shape[1:], n_split), *array.shape[2:]).copy()
        return object_array([piece for cell in array for piece in _pieces(name, cell, n_split)])

    return derived(
        data,
        {name: tensor_rows(name, tensor) for name, tensor in tensors.items()},
        {name: array_rows(name, array) for name, array in arrays.items()},
        None if rows is None else count,
    )


def _dense(name: str, tensor: Tensor, what: str) -> Tensor:
    if tensor.is_nested:
        raise BatchError(f"{what}: {name} is jagged, its rows have no common shape; use to_padded_tensor on it first")
    return tensor


def _divided(name: str, row_shape: tuple[int, ...], n_split: int) -> int:
    if not row_shape or row_shape[0] % n_split:
        raise BatchError(
            f"unfold_column_chunks: rows of {name} have shape {tuple(row_shape)}, their first dimension does not make "
            f"{n_split} equal parts; leave {name} out of split_keys to repeat it"
        )
    return row_shape[0] // n_split


def _pieces(name: str, cell: Any, n_split: int) -> list[Any]:
    width = _divided(name, (len(cell),) if hasattr(cell, "__len__") else (), n_split)
    return [cell[number * width : (number + 1) * width] for number in range(n_split)]
