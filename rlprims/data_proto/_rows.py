"""Row numbers from an index, a mask, or the values of a column."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.data_proto._columns import Array
from rlprims.data_proto._errors import BatchError, RowIndexError


def row_range(count: int) -> Tensor:
    """The row numbers below ``count``. They are on the CPU for any default device of torch, like object columns."""
    return torch.arange(count, device="cpu")


def row_numbers(index: Any, rows: int, what: str, fields: str) -> Tensor:
    """Row numbers from a list, range, array or tensor of integers, or from a mask.

    ``what`` is the name of the method and ``fields`` lists the fields of the batch, for messages.
    """
    if isinstance(index, Tensor):
        given = index.detach().cpu()
    elif isinstance(index, list | range | np.ndarray):
        array = np.asarray(index)
        if array.dtype.kind not in "biuf":
            raise BatchError(f"{what}: cannot index rows with {array.dtype}: {index!r}; use integers or a mask")
        given = torch.from_numpy(np.array(array, dtype=bool if array.dtype.kind == "b" else None))
    else:
        raise BatchError(
            f"{what}: cannot index rows with {type(index).__name__}; use an int, a slice, or a list, array or tensor "
            "of integers or of booleans (one per row)"
        )
    if given.ndim != 1:
        raise BatchError(f"{what}: the index has shape {tuple(given.shape)}, expected one dimension")
    if given.dtype == torch.bool:
        if given.numel() != rows:
            raise BatchError(f"{what}: the mask has {given.numel()} entries, the batch {rows} rows; {fields}")
        return given.nonzero().squeeze(1)
    if (given.is_floating_point() or given.is_complex()) and given.numel():
        raise BatchError(f"{what}: cannot index rows with {given.dtype}; use integers or a mask")
    given = given.long()
    if given.numel():
        lowest, highest = (int(end) for end in given.aminmax())
        if lowest < -rows or highest >= rows:
            wrong = highest if highest >= rows else lowest
            raise RowIndexError(f"{what}: row {wrong} of a batch of {rows} rows; {fields}")
        if lowest < 0:
            given = torch.where(given < 0, given + rows, given)
    return given


def distinct_values(column: Tensor) -> tuple[list[Any], Tensor]:
    """The distinct values in the order of their first row, and each row's position among them."""
    values, ids = torch.unique(column.detach().cpu(), return_inverse=True)
    first = torch.empty_like(ids[: values.numel()])
    first = first.scatter_reduce(0, ids, row_range(ids.numel()), "amin", include_self=False)
    order = first.argsort()
    rank = torch.empty_like(order).scatter_(0, order, row_range(order.numel()))
    return values[order].tolist(), rank[ids]


def distinct_objects(key: str, column: Array) -> tuple[list[Any], Tensor]:
    """The distinct objects in the order of their first row, and each row's position among them."""
    seen: dict[Any, int] = {}
    try:
        ids = [seen.setdefault(label, len(seen)) for label in column.tolist()]
    except TypeError as error:
        raise BatchError(f"group_by: {key} has a value that cannot be a dict key ({error}); group by another") from None
    return list(seen), torch.tensor(ids, dtype=torch.long, device="cpu")
