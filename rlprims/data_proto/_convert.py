"""To and from other containers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rlprims.data_proto import _jagged
from rlprims.data_proto._columns import Array, object_array
from rlprims.data_proto._errors import BatchError
from rlprims.data_proto._parts import batch_of, check_tensor, columns

if TYPE_CHECKING:
    from rlprims.data_proto._container import DataProto


def parts_of_tensordict(
    tensordict: TensorDict, meta_info: Mapping[Any, Any]
) -> tuple[Any, dict[str, Array], dict[Any, Any]]:
    """``batch``, ``non_tensor_batch`` and ``meta_info`` of what `to_tensordict` made."""
    if len(tensordict.batch_size) != 1:
        raise BatchError(f"from_tensordict: batch_size is {tuple(tensordict.batch_size)}, one dimension is needed")
    tensors: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    meta = dict(meta_info)
    for name, value in tensordict.items():
        if isinstance(value, NonTensorStack):
            arrays[name] = object_array([cell.data for cell in value.unbind(0)] if len(value) else [])
        elif isinstance(value, NonTensorData):
            if name in meta:
                raise BatchError(f"from_tensordict: both the TensorDict and meta_info have {name!r}; drop one")
            meta[name] = value.data
        else:
            check_tensor(name, value)
            tensors[name] = value
    keep = tensors or not arrays
    return batch_of(tensors, tensordict.batch_size[0], tensordict.device) if keep else None, arrays, meta


def to_tensordict(data: DataProto) -> Any:
    """One TensorDict of all fields: arrays become per-row objects (`NonTensorStack`), metadata `NonTensorData`.

    Numpy columns of numbers come back from `from_tensordict` as object columns, since a TensorDict has no other place.

    Raises:
        BatchError: a name that two parts have, or a metadata key that is no string.

    >>> import torch
    >>> from rlprims.data_proto import DataProto
    >>> DataProto.from_dict({"ids": torch.arange(2)}, {"uid": ["a", "b"]}).to_tensordict()["uid"] == ["a", "b"]
    True
    """
    tensors, arrays, rows = columns(data)
    twice = sorted(str(key) for key in data.meta_info if key in tensors or key in arrays or not isinstance(key, str))
    if twice:
        raise BatchError(f"to_tensordict: metadata {twice} needs string keys that no column has; rename or drop them")
    result = batch_of(tensors, rows or 0, data.batch.device if data.batch is not None else None)
    for name, array in arrays.items():
        try:
            result[name] = NonTensorStack(*[NonTensorData(cell) for cell in array])
        except IndexError as error:
            raise BatchError(
                f"to_tensordict: the installed tensordict has no object column of zero rows, such as {name!r}; drop it "
                "with select, or install a newer tensordict"
            ) from error
    for key, value in data.meta_info.items():
        result[key] = NonTensorData(value, batch_size=result.batch_size)
    return result


def to_pandas(data: DataProto) -> Any:
    """A pandas DataFrame to read: one line per row, one column per field; a row of a tensor is a list.

    Raises:
        ImportError: pandas is not installed.
    """
    return _optional("pandas").DataFrame(_readable(data))


def to_arrow(data: DataProto) -> Any:
    """A pyarrow Table to read: one line per row, one column per field; a row of a tensor is a list.

    Raises:
        ImportError: pyarrow is not installed.
    """
    return _optional("pyarrow").table(_readable(data))


def _optional(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"this needs {package}, which is not installed: pip install {package}") from error


def _readable(data: DataProto) -> dict[str, list[Any]]:
    tensors, arrays, _ = columns(data)
    lists = {name: _lists(tensor.detach()) for name, tensor in tensors.items()}
    return lists | {name: [_plain(cell) for cell in array] for name, array in arrays.items()}


def _lists(tensor: Tensor) -> list[Any]:
    if tensor.is_nested:
        return [_jagged.row(tensor, index).tolist() for index in range(tensor.shape[0])]
    return tensor.tolist()


def _plain(cell: Any) -> Any:
    return cell.tolist() if isinstance(cell, np.ndarray | np.generic | Tensor) else cell
