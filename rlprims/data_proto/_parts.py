"""The three parts of a batch, as its methods use them."""

from collections.abc import Mapping
from typing import Any, Self, TypeVar

import numpy as np

from rlprims.data_proto._columns import Array, BatchError, Columns, MissingField, batch_of, checked, listing
from rlprims.data_proto._values import copied


class Parts:
    """The base of :class:`rlprims.data_proto.DataProto`."""

    batch: Any
    non_tensor_batch: dict[str, Array]
    meta_info: dict[Any, Any]

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(array) for array in self.non_tensor_batch.values()), 0)

    def _columns(self) -> Columns:
        """The columns, checked, because a caller may have written into ``batch`` or ``non_tensor_batch`` directly."""
        for name, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                raise BatchError(
                    f"non_tensor_batch[{name!r}] is {type(array).__name__}, expected a numpy array with one entry per "
                    f"row; assign with data[{name!r}] = [...], or keep it in meta_info; {self._fields()}"
                )
        tensors = {} if self.batch is None else dict(self.batch.items())
        return checked(tensors, self.non_tensor_batch, self.batch)

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
            raise MissingField(f"no field {name!r}; {self._fields()}")
        return part


D = TypeVar("D", bound=Parts)
