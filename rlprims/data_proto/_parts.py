"""What every method does first and last: take a batch apart, checked; put a new one together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlprims.data_proto._columns import Array, is_column, object_array
from rlprims.data_proto._errors import BatchError, MissingField, listing, names
from rlprims.data_proto._meta import copied

if TYPE_CHECKING:
    from rlprims.data_proto._container import DataProto

D = TypeVar("D", bound="DataProto")


class Columns(NamedTuple):
    """The columns of a batch. ``rows`` is None where nothing has rows, not even an empty ``batch``."""

    tensors: dict[str, Tensor]
    arrays: dict[str, Array]
    rows: int | None


def columns(data: DataProto) -> Columns:
    """The columns, after the check: a caller may have written into ``batch`` or ``non_tensor_batch`` himself."""
    tensors = {} if data.batch is None else dict(data.batch.items())
    arrays = data.non_tensor_batch
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise BatchError(
                f"non_tensor_batch[{name!r}] is {type(array).__name__}, it needs a numpy array with one entry per "
                f"row; assign with data[{name!r}] = [...], or keep it in meta_info; {fields(data)}"
            )
    return Columns(tensors, arrays, common_rows(tensors, arrays, data.batch))


def check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise BatchError(
            f"batch[{name!r}] is {type(tensor).__name__}, it needs a tensor; numpy arrays and lists belong in "
            "non_tensor_batch, other objects in meta_info; flatten a nested TensorDict with flatten_keys('.')"
        )
    if tensor.ndim == 0:
        raise BatchError(f"batch[{name!r}] has no rows: it is a scalar; keep it in meta_info")
    if tensor.is_nested and tensor.layout != torch.jagged:
        raise BatchError(
            f"batch[{name!r}] is a nested tensor of layout {tensor.layout}, it needs torch.jagged; build it with "
            "torch.nested.nested_tensor(..., layout=torch.jagged)"
        )


def common_rows(tensors: Mapping[str, Tensor], arrays: Mapping[str, Array], batch: Any = None) -> int | None:
    """The number of rows that all columns have; None where there is no column."""
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


def fields(data: DataProto) -> str:
    return listing(data.batch, data.non_tensor_batch, data.meta_info)


def part_of(data: DataProto, name: object) -> Any:
    """The part that holds a field, to read or to pop from; None where none does."""
    if data.batch is not None and name in data.batch.keys():  # noqa: SIM118 - a TensorDict has no other `in`
        return data.batch
    return next((part for part in (data.non_tensor_batch, data.meta_info) if name in part), None)


def missing(data: DataProto, name: object) -> MissingField:
    return MissingField(f"no field {name!r}; {fields(data)}")


def as_array(name: str, value: Any) -> Array:
    """An object column as it is stored: an array as it is, a list as one object per row."""
    if isinstance(value, np.ndarray) and value.ndim:
        return value
    if not is_column(value) or isinstance(value, Tensor):
        raise BatchError(
            f"non_tensor_batch[{name!r}] is {type(value).__name__}, it needs a numpy array or a list with one entry "
            "per row; tensors belong in batch, what all rows share in meta_info"
        )
    return object_array(value)


def batch_of(tensors: Mapping[str, Tensor], rows: int, device: Any = None) -> Any:
    return TensorDict(dict(tensors), batch_size=torch.Size([rows]), device=device)


def derived(
    data: D,
    tensors: Mapping[str, Tensor],
    arrays: Mapping[str, Array],
    rows: int | None,
    meta_info: dict[Any, Any] | None = None,
) -> D:
    """A batch of the same type from columns that fit. ``arrays`` and ``meta_info`` must be the result's own."""
    keep_batch = rows is not None and (tensors or data.batch is not None)
    device = data.batch.device if data.batch is not None else None
    return assembled(data, batch_of(tensors, rows or 0, device) if keep_batch else None, arrays, meta_info)


def assembled(data: D, batch: Any, arrays: Mapping[str, Array], meta_info: dict[Any, Any] | None = None) -> D:
    """A batch of the same type from parts of its own; None copies ``meta_info``."""
    new = object.__new__(type(data))
    new.batch = batch
    new.non_tensor_batch = dict(arrays)
    new.meta_info = copied(data.meta_info) if meta_info is None else meta_info
    return new
