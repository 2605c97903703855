"""The three parts of a batch: their checks, and new batches made from columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rlprims.data_proto._columns import Array, Columns, batch_of, check_tensor, common_rows
from rlprims.data_proto._errors import BatchError, MissingField, listing
from rlprims.data_proto._rows import row_range
from rlprims.data_proto._values import copied


class Parts:
    """The base class of ``DataProto``. Use ``DataProto``."""

    batch: Any
    non_tensor_batch: dict[str, Array]
    meta_info: dict[Any, Any]

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(array) for array in self.non_tensor_batch.values()), 0)

    def __contains__(self, name: object) -> bool:
        return self._find(name) is not None

    def _columns(self) -> Columns:
        """The columns, checked, because a caller may have written into ``batch`` or ``non_tensor_batch`` directly."""
        tensors = {} if self.batch is None else dict(self.batch.items())
        for name, tensor in tensors.items():
            check_tensor(name, tensor)
        for name, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                raise BatchError(
                    f"non_tensor_batch[{name!r}] is {type(array).__name__}, expected a numpy array with one entry per "
                    f"row; assign with data[{name!r}] = [...], or keep it in meta_info; {self._fields()}"
                )
        return Columns(tensors, self.non_tensor_batch, common_rows(tensors, self.non_tensor_batch, self.batch))

    def _like(self, columns: Columns, meta_info: dict[Any, Any] | None = None) -> Self:
        """A batch of the same type. The arrays and ``meta_info`` must not be shared; None copies this metadata."""
        tensors, arrays, rows = columns
        keep_batch = rows is not None and (tensors or self.batch is not None)
        device = self.batch.device if self.batch is not None else None
        return self._of(batch_of(tensors, rows or 0, device) if keep_batch else None, arrays, meta_info)

    def _of(self, batch: Any, arrays: Mapping[str, Array], meta_info: dict[Any, Any] | None = None) -> Self:
        """A batch of the same type from parts that are not shared. They are not checked again."""
        new = object.__new__(type(self))
        new.batch = batch
        new.non_tensor_batch = dict(arrays)
        new.meta_info = copied(self.meta_info) if meta_info is None else meta_info
        return new

    def _gather(self, numbers: Tensor) -> Self:
        """The rows with these numbers: one copy, or views if they are consecutive."""
        count = numbers.numel()
        start = int(numbers[0]) if count else 0
        follow = torch.equal(numbers, row_range(count) + start)
        columns = self._columns()
        return self._like(columns.narrow(start, start + count) if follow else columns.take(numbers))

    def _cut(self, sizes: Sequence[int]) -> list[Self]:
        """All rows as views, in parts of these sizes. Each column is checked and split once."""
        columns = self._columns()
        tensors, arrays, rows = columns
        bounds = list(pairwise(accumulate(sizes, initial=0)))
        if not tensors or any(tensor.is_nested for tensor in tensors.values()):
            # A TensorDict cannot split a jagged column.
            return [self._like(columns.narrow(start, stop)) for start, stop in bounds]
        batches = batch_of(tensors, rows or 0, self.batch.device).split(list(sizes)) if sizes else ()
        return [
            self._of(batch, {name: array[start:stop].copy() for name, array in arrays.items()})
            for batch, (start, stop) in zip(batches, bounds, strict=True)
        ]

    def _extended(self, numbers: Tensor) -> Self:
        """All rows, followed by the rows with these numbers: one copy, or views if none are added."""
        columns = self._columns()
        return self._like(columns.extended(numbers) if numbers.numel() else columns.narrow(0, len(self)))

    def _fields(self) -> str:
        """The existing fields by part, for a message."""
        return listing(self.batch, self.non_tensor_batch, self.meta_info)

    def _find(self, name: object) -> Any:
        """The part that has a field, to read or to pop from; None if there is none."""
        if self.batch is not None and name in self.batch.keys():  # noqa: SIM118 - a TensorDict has no other `in`
            return self.batch
        return next((part for part in (self.non_tensor_batch, self.meta_info) if name in part), None)

    def _part_of(self, name: object) -> Any:
        if (part := self._find(name)) is None:
            raise self._missing(name)
        return part

    def _known(self, part: Mapping[Any, Any], wanted: Iterable[Any] | None) -> list[Any]:
        """The names in ``wanted``, which must be in the part; None: all names of the part."""
        wanted = [wanted] if isinstance(wanted, str) else wanted
        found = list(part) if wanted is None else list(wanted)
        for name in found:
            if name not in part:
                raise self._missing(name)
        return found

    def _missing(self, name: object) -> MissingField:
        return MissingField(f"no field {name!r}; {self._fields()}")
