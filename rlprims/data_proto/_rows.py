"""Which rows a batch has, and in which order: a run of them (views) or a gather by their numbers (one copy)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.data_proto import _columns
from rlprims.data_proto._columns import Array
from rlprims.data_proto._errors import BatchError, RowIndexError
from rlprims.data_proto._parts import D, assembled, batch_of, columns, derived, fields, missing, part_of


def upto(count: int) -> Tensor:
    """The row numbers 0 to count. They stay on the CPU whatever torch's default device is, as object columns do."""
    return torch.arange(count, device="cpu")


def run(data: D, start: int, stop: int) -> D:
    """Rows start to stop: views of the tensors."""
    tensors, arrays, rows = columns(data)
    return derived(
        data,
        {name: _columns.narrow(tensor, start, stop) for name, tensor in tensors.items()},
        {name: array[start:stop].copy() for name, array in arrays.items()},
        None if rows is None else stop - start,
    )


def cut(data: D, sizes: Sequence[int]) -> list[D]:
    """All rows, in runs of these sizes one after another. Quicker than `run` of each: one check, one cut per column."""
    tensors, arrays, rows = columns(data)
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    if not tensors or any(tensor.is_nested for tensor in tensors.values()):
        return [run(data, start, stop) for start, stop in bounds]  # a TensorDict cannot cut a jagged column
    batches = batch_of(tensors, rows or 0, data.batch.device).split(list(sizes)) if sizes else ()
    return [
        assembled(data, batch, {name: array[start:stop].copy() for name, array in arrays.items()})
        for batch, (start, stop) in zip(batches, bounds, strict=True)
    ]


def gather(data: D, numbers: Tensor) -> D:
    """The rows with these numbers (int64, on the CPU, from 0): one copy, or a view where they follow each other."""
    count = numbers.numel()
    start = int(numbers[0]) if count else 0
    if torch.equal(numbers, upto(count) + start):
        return run(data, start, start + count)
    return taken(data, numbers)


def taken(data: D, numbers: Tensor) -> D:
    """The rows with these numbers in memory of their own."""
    tensors, arrays, rows = columns(data)
    return derived(
        data,
        {name: _columns.take(tensor, numbers) for name, tensor in tensors.items()},
        {name: array[numbers.numpy()] for name, array in arrays.items()},
        None if rows is None else numbers.numel(),
    )


def numbers_of(data: D, index: Any, what: str) -> Tensor:
    """Row numbers from a list, range, array or tensor of integers, or from a mask."""
    rows = len(data)
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
        raise BatchError(f"{what}: the index has shape {tuple(given.shape)}, it needs one dimension")
    if given.dtype == torch.bool:
        if given.numel() != rows:
            raise BatchError(f"{what}: the mask has {given.numel()} entries, the batch {rows} rows; {fields(data)}")
        return given.nonzero().squeeze(1)
    if (given.is_floating_point() or given.is_complex()) and given.numel():
        raise BatchError(f"{what}: cannot index rows with {given.dtype}; use integers or a mask")
    given = given.long()
    if given.numel():
        lowest, highest = (int(end) for end in given.aminmax())
        if lowest < -rows or highest >= rows:
            wrong = highest if highest >= rows else lowest
            raise RowIndexError(f"{what}: row {wrong} of a batch of {rows} rows; {fields(data)}")
        if lowest < 0:
            given = torch.where(given < 0, given + rows, given)
    return given


def slice_rows(data: D, start: int | None = None, end: int | None = None, step: int | None = None) -> D:
    """Rows from start to end, counted as Python's slices are. Without a step the tensors are views.

    Raises:
        BatchError: a step of 0.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(5)})
    >>> data.slice(1, 3)["ids"].tolist(), data[::-2]["ids"].tolist()
    ([1, 2], [4, 2, 0])
    """
    if step == 0:
        raise BatchError("slice: step is 0, it needs to be another integer")
    picked = range(len(data))[start:end:step]
    if picked.step == 1:
        return run(data, picked.start, max(picked.start, picked.stop))
    return gather(data, upto(len(picked)) * picked.step + picked.start)


def select_idxs(data: D, idxs: list[Any] | range | Array | Tensor) -> D:
    """The rows with these numbers (negative ones count from the end, repeats are allowed), or those of a mask.

    Rows that follow each other are views; others are copied once.

    Raises:
        BatchError: an index that is neither integers nor a mask, or a mask that has not one entry per row.
        RowIndexError: a number that no row has.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(4)})
    >>> data.select_idxs([3, 0, 0])["ids"].tolist(), data[torch.tensor([True, False, True, False])]["ids"].tolist()
    ([3, 0, 0], [0, 2])
    """
    return gather(data, numbers_of(data, idxs, "select_idxs"))


def keep_rows(data: D, keep: list[bool] | Array | Tensor | Callable[[D], Any]) -> D:
    """The rows where a mask is true. A function gets the whole batch and answers with the mask.

    Raises:
        BatchError: anything else than one boolean per row.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"scores": torch.tensor([0.0, 1.0, 0.5])}, {"uid": ["a", "b", "c"]})
    >>> data.filter(lambda batch: batch["scores"] > 0)["uid"].tolist()
    ['b', 'c']
    """
    mask = keep(data) if callable(keep) else keep
    if isinstance(mask, list):
        mask = np.array(mask, dtype=bool if not mask else None)
    if "bool" not in str(getattr(mask, "dtype", None)):
        kind = getattr(mask, "dtype", type(mask).__name__)
        raise BatchError(f"filter: keep is {kind}, it needs one boolean per row; use select_idxs for row numbers")
    return gather(data, numbers_of(data, mask, "filter"))


def group_by(data: D, key: str) -> dict[Hashable, D]:
    """Per distinct value of a field, the rows that have it. Groups and rows keep the order in which they came.

    All rows are gathered once; the groups are views of that.

    Raises:
        MissingField: no such field.
        BatchError: the field is no column of one hashable value per row.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(4)}, {"uid": ["b", "a", "b", "a"]})
    >>> {uid: group["ids"].tolist() for uid, group in data.group_by("uid").items()}
    {'b': [0, 2], 'a': [1, 3]}
    """
    part = part_of(data, key)
    if part is None:
        raise missing(data, key)
    column = part[key]
    if part is data.meta_info or column.ndim != 1 or getattr(column, "is_nested", False):
        raise BatchError(f"group_by: {key} needs to be a column of one value per row; {fields(data)}")
    labels, ids = _distinct(column) if isinstance(column, Tensor) else _distinct_objects(key, column)
    grouped = gather(data, ids.argsort(stable=True))
    sizes = ids.bincount(minlength=len(labels)).tolist()
    return dict(zip(labels, cut(grouped, sizes), strict=True))


def _distinct(column: Tensor) -> tuple[list[Any], Tensor]:
    """The distinct values in the order of their first row, and each row's position among them."""
    values, ids = torch.unique(column.detach().cpu(), return_inverse=True)
    first = torch.empty_like(ids[: values.numel()])
    first = first.scatter_reduce(0, ids, upto(ids.numel()), "amin", include_self=False)
    order = first.argsort()
    rank = torch.empty_like(order).scatter_(0, order, upto(order.numel()))
    return values[order].tolist(), rank[ids]


def _distinct_objects(key: str, column: Array) -> tuple[list[Any], Tensor]:
    seen: dict[Any, int] = {}
    try:
        ids = [seen.setdefault(label, len(seen)) for label in column.tolist()]
    except TypeError as error:
        raise BatchError(f"group_by: {key} has a value that cannot be a dict key ({error}); group by another") from None
    return list(seen), torch.tensor(ids, dtype=torch.long, device="cpu")


def reorder(data: D, indices: list[int] | Array | Tensor) -> D:
    """A batch with all rows in another order: row i of the result is row ``indices[i]``. This batch stays as it is.

    Raises:
        BatchError: indices that are not each row exactly once; `select_idxs` takes those.

    >>> from rlprims.data_proto import DataProto
    >>> DataProto.from_dict({"ids": torch.arange(3)}).reorder([2, 0, 1])["ids"].tolist()
    [2, 0, 1]
    """
    numbers = numbers_of(data, indices, "reorder")
    if not torch.equal(numbers.sort().values, upto(len(data))):
        raise BatchError(
            f"reorder: {numbers.numel()} indices for {len(data)} rows, each row exactly once is needed; use "
            "select_idxs to drop or repeat rows"
        )
    return gather(data, numbers)


def shuffle(data: D, generator: torch.Generator) -> D:
    """All rows in a random order, drawn from the generator.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(3)})
    >>> sorted(data.shuffle(torch.Generator().manual_seed(0))["ids"].tolist())
    [0, 1, 2]
    """
    return gather(data, torch.randperm(len(data), generator=generator, device=generator.device).cpu())
