"""Rows of a batch cut into several: verl's method ``DataProto.unfold_column_chunks``, as a function.

With this file beside your script:

>>> import torch
>>> from rlprims import DataProto
>>> data = DataProto.from_dict({"pair": torch.tensor([[1, 2], [3, 4]])}, {"uid": ["a", "b"]})
>>> cut = unfold_column_chunks(data, 2, split_keys=["pair"])
>>> cut["pair"].tolist(), cut["uid"].tolist()
([[1], [2], [3], [4]], ['a', 'a', 'b', 'b'])
"""

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from einops import rearrange
from torch import Tensor

from rlprims.data_proto import BatchError, DataProto, MissingField

Batch = TypeVar("Batch", bound=DataProto)


def unfold_column_chunks(data: Batch, n_split: int, split_keys: Iterable[str] | None = None) -> Batch:
    """Cut each row into ``n_split`` rows. Fields in ``split_keys`` are cut along their second dimension.

    All other fields are repeated. An object column without a second dimension is cut cell by cell.

    Raises:
        MissingField: a split key that is not a column.
        BatchError: ``n_split`` does not divide the second dimension, or a field to split is jagged.
    """
    keys = list(split_keys or ())
    columns = {**(data.batch if data.batch is not None else {}), **data.non_tensor_batch}
    for name in keys:
        if name not in columns:
            raise MissingField(f"no column {name!r}; the columns are {sorted(columns)}")
    if n_split < 1:
        raise BatchError(f"unfold_column_chunks: n_split is {n_split}, expected at least 1")
    cut = {name: _cut(name, columns[name], n_split) for name in keys}
    rows = data.repeat(n_split)
    for name, column in cut.items():
        rows[name] = column
    return rows


def _cut(name: str, column: Any, n_split: int) -> Any:
    if isinstance(column, Tensor):
        if column.is_nested:
            raise BatchError(f"{name} is jagged, expected rows of one shape; use to_padded_tensor on it first")
        _check_divides(name, column.shape[1:], n_split)
        return rearrange(column, "b (n w) ... -> (b n) w ...", n=n_split)
    if column.ndim > 1:
        _check_divides(name, column.shape[1:], n_split)
        return rearrange(column, "b (n w) ... -> (b n) w ...", n=n_split).copy()
    pieces = np.empty(len(column) * n_split, dtype=object)
    for row, cell in enumerate(column):
        _check_divides(name, (len(cell),) if hasattr(cell, "__len__") else (), n_split)
        width = len(cell) // n_split
        for number in range(n_split):
            pieces[row * n_split + number] = cell[number * width : (number + 1) * width]
    return pieces


def _check_divides(name: str, row_shape: tuple[int, ...], n_split: int) -> None:
    if not row_shape or row_shape[0] % n_split:
        raise BatchError(
            f"unfold_column_chunks: rows of {name} have shape {tuple(row_shape)}, expected a first dimension of "
            f"{n_split} equal parts; leave {name} out of split_keys to repeat it"
        )
