"""The methods of a batch that choose, repeat, order or divide its rows."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import einops
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlprims.data_proto._columns import (
    Array,
    BatchError,
    MissingField,
    RowIndexError,
    batch_of,
    joined,
    listing,
    row,
    row_numbers,
    row_range,
)
from rlprims.data_proto._parts import D, Parts
from rlprims.data_proto._values import copied


@dataclass(frozen=True)
class DataProtoItem:
    """One row: its tensors (a TensorDict without a batch dimension), its objects, and a copy of ``meta_info``.

    >>> import torch
    >>> from rlprims.data_proto import DataProto
    >>> item = DataProto.from_dict({"ids": torch.arange(2)}, {"uid": ["a", "b"]}, {"step": 1})[1]
    >>> item["ids"], item["uid"], item["step"]
    (tensor(1), 'b', 1)
    """

    batch: Any
    non_tensor_batch: dict[str, Any]
    meta_info: dict[Any, Any]

    def __getitem__(self, name: str) -> Any:
        for part in (self.batch, self.non_tensor_batch, self.meta_info):
            if part is not None and name in part.keys():  # noqa: SIM118 - a TensorDict has no other `in`
                return part[name]
        raise MissingField(f"no field {name!r}; {listing(self.batch, self.non_tensor_batch, self.meta_info)}")


def item(data: Parts, key: Any) -> DataProtoItem:
    """One row, by its number."""
    tensors, arrays, _ = data._columns()
    if isinstance(key, bool) or "int" not in str(getattr(key, "dtype", "int")):
        raise BatchError(f"row index {key!r}, expected an integer; index with a list or a mask for several rows")
    rows, index = len(data), int(key)
    if not -rows <= index < rows:
        raise RowIndexError(f"row {index} of a batch of {rows} rows; {data._fields()}")
    cells = {name: row(tensor, index % rows) for name, tensor in tensors.items()}
    batch = None if data.batch is None else TensorDict(cells, batch_size=[], device=data.batch.device)
    return DataProtoItem(batch, {name: array[index] for name, array in arrays.items()}, copied(data.meta_info))


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
        raise BatchError("slice: step is 0, expected another integer")
    rows = range(len(data))[start:end:step]
    if rows.step == 1:
        return data._like(data._columns().narrow(rows.start, max(rows.start, rows.stop)))
    return gathered(data, row_range(len(rows)) * rows.step + rows.start)


def select_idxs(data: D, idxs: list[Any] | range | Array | Tensor) -> D:
    """The rows with these numbers (negative ones count from the end, repeats are allowed), or those of a mask.

    Consecutive rows are views; other rows are copied once.

    Raises:
        BatchError: an index that is neither integers nor a mask, or a mask without one entry per row.
        RowIndexError: a number that no row has.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(4)})
    >>> data.select_idxs([3, 0, 0])["ids"].tolist(), data[torch.tensor([True, False, True, False])]["ids"].tolist()
    ([3, 0, 0], [0, 2])
    """
    return gathered(data, row_numbers(idxs, len(data), "select_idxs", data._fields()))


def filter_rows(data: D, keep: list[bool] | Array | Tensor | Callable[[D], Any]) -> D:
    """The rows where a mask is true. A function is called with the whole batch and must return the mask.

    Raises:
        BatchError: anything other than one boolean per row.

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
        raise BatchError(f"filter: keep is {kind}, expected one boolean per row; use select_idxs for row numbers")
    return gathered(data, row_numbers(mask, len(data), "filter", data._fields()))


def group_by(data: D, key: str) -> dict[Hashable, D]:
    """A batch of the rows for each distinct value of a field. Groups and rows keep their order.

    All rows are gathered once, and the groups are views of the result.

    Raises:
        MissingField: no such field.
        BatchError: the field is not a column with one hashable value per row.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(4)}, {"uid": ["b", "a", "b", "a"]})
    >>> {uid: group["ids"].tolist() for uid, group in data.group_by("uid").items()}
    {'b': [0, 2], 'a': [1, 3]}
    """
    part = data._part_of(key)
    column = part[key]
    if part is data.meta_info or column.ndim != 1 or getattr(column, "is_nested", False):
        raise BatchError(f"group_by: expected {key} to be a column with one value per row; {data._fields()}")
    seen: dict[Any, int] = {}
    try:
        ids = torch.tensor([seen.setdefault(label, len(seen)) for label in column.tolist()], device="cpu").long()
    except TypeError as error:
        raise BatchError(f"group_by: {key} has a value that cannot be a dict key ({error}); group by another") from None
    grouped = gathered(data, ids.argsort(stable=True))
    return dict(zip(seen, parts_of(grouped, ids.bincount(minlength=len(seen)).tolist()), strict=True))


def reorder(data: D, indices: list[int] | Array | Tensor) -> D:
    """A batch with all rows in another order: row i of the result is row ``indices[i]``. This batch is unchanged.

    Raises:
        BatchError: indices that do not contain each row exactly once; use `select_idxs` for those.

    >>> from rlprims.data_proto import DataProto
    >>> DataProto.from_dict({"ids": torch.arange(3)}).reorder([2, 0, 1])["ids"].tolist()
    [2, 0, 1]
    """
    numbers = row_numbers(indices, len(data), "reorder", data._fields())
    if not torch.equal(numbers.sort().values, row_range(len(data))):
        given = f"{numbers.numel()} indices for {len(data)} rows"
        raise BatchError(f"reorder: {given}, expected each row exactly once; use select_idxs to drop or repeat rows")
    return gathered(data, numbers)


def shuffle(data: D, generator: torch.Generator) -> D:
    """All rows in a random order, drawn from the generator."""
    return gathered(data, torch.randperm(len(data), generator=generator, device=generator.device).cpu())


def chunk(data: D, chunks: int, *, pad: bool = False) -> list[D]:
    """Equal parts, as views. With ``pad`` missing rows are added as in `pad_to_divisor`.

    Only parts with added rows are copied: ``-len(data) % chunks`` rows in all. `concat` the results, then `unpad`.

    Raises:
        BatchError: the rows do not divide; use ``pad``, or `split`.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(3)})
    >>> [part["ids"].tolist() for part in data.chunk(2, pad=True)], [len(part) for part in data.split(2)]
    ([[0, 1], [2, 0]], [2, 1])
    """
    rows = len(data)
    if chunks < 1 or (rows % chunks and not pad):
        fix = "use pad=True, or split(size), whose last part may be smaller"
        raise BatchError(f"chunk: {rows} rows do not divide into {chunks} equal parts; {fix}; {data._fields()}")
    size = -(-rows // chunks)
    if not rows % chunks:
        return parts_of(data, [size] * chunks)
    whole = rows // size
    last = (row_range((chunks - whole) * size) + whole * size) % rows
    padded = data._like(data._columns().take(last))
    return parts_of(slice_rows(data, 0, whole * size), [size] * whole) + parts_of(padded, [size] * (chunks - whole))


def split(data: D, split_size: int) -> list[D]:
    """Parts of ``split_size`` rows, as views; the last may be smaller. Zero rows give no part.

    Raises:
        BatchError: a size below 1.
    """
    if split_size < 1:
        raise BatchError(f"split: split_size is {split_size}, expected at least 1")
    rows = len(data)
    return parts_of(data, [min(split_size, rows - start) for start in range(0, rows, split_size)])


def repeat(data: D, repeat_times: int = 2, interleave: bool = True) -> D:
    """Every row several times: a a b b if interleaved, else a b a b.

    Raises:
        BatchError: a negative number of times.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(2)})
    >>> data.repeat(2)["ids"].tolist(), data.repeat(2, interleave=False)["ids"].tolist()
    ([0, 0, 1, 1], [0, 1, 0, 1])
    """
    if repeat_times < 0:
        raise BatchError(f"repeat: repeat_times is {repeat_times}, expected at least 0")
    if repeat_times == 1:
        return slice_rows(data)
    pattern = "row -> (row copy)" if interleave else "row -> (copy row)"
    return data._like(data._columns().take(einops.repeat(row_range(len(data)), pattern, copy=repeat_times)))


def pad_to_divisor(data: D, size_divisor: int) -> tuple[D, int]:
    """Add rows until the divisor divides their number; returns the batch and the number of added rows.

    The added rows repeat the batch from its first row. Zero rows stay zero rows. `unpad` removes the added rows.

    Raises:
        BatchError: a divisor below 1.

    >>> from rlprims.data_proto import DataProto
    >>> padded, added = DataProto.from_dict({"ids": torch.arange(3)}).pad_to_divisor(4)
    >>> padded["ids"].tolist(), added, padded.unpad(added)["ids"].tolist()
    ([0, 1, 2, 0], 1, [0, 1, 2])
    """
    if size_divisor < 1:
        raise BatchError(f"pad_to_divisor: size_divisor is {size_divisor}, expected at least 1")
    rows = len(data)
    added = -rows % size_divisor
    return extended(data, row_range(added) % max(rows, 1)), added


def unpad(data: D, pad_size: int) -> D:
    """The batch without its last ``pad_size`` rows, which :meth:`pad_to_divisor` added.

    Raises:
        BatchError: fewer rows than that, or a negative number.
    """
    if not 0 <= pad_size <= len(data):
        raise BatchError(f"unpad: cannot take {pad_size} rows off {len(data)}; pass what pad_to_divisor returned")
    return slice_rows(data, 0, len(data) - pad_size)


def gathered(data: D, numbers: Tensor) -> D:
    """The rows with these numbers: one copy, or views if they are consecutive."""
    count = numbers.numel()
    start = int(numbers[0]) if count else 0
    consecutive = torch.equal(numbers, row_range(count) + start)
    columns = data._columns()
    return data._like(columns.narrow(start, start + count) if consecutive else columns.take(numbers))


def parts_of(data: D, sizes: Sequence[int]) -> list[D]:
    """All rows as views, in parts of these sizes. Each column is checked and split once."""
    columns = data._columns()
    tensors, arrays, rows = columns
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    if not tensors or any(tensor.is_nested for tensor in tensors.values()):  # a TensorDict cannot split a jagged column
        return [data._like(columns.narrow(start, stop)) for start, stop in bounds]
    batches = batch_of(tensors, rows or 0, data.batch.device).split(list(sizes)) if sizes else ()
    return [
        data._of(batch, {name: array[start:stop].copy() for name, array in arrays.items()})
        for batch, (start, stop) in zip(batches, bounds, strict=True)
    ]


def extended(data: D, numbers: Tensor) -> D:
    """All rows, followed by the rows with these numbers: one copy, or views if none are added."""
    columns = data._columns()
    return data._like(joined([columns, columns.take(numbers)])) if numbers.numel() else slice_rows(data)
