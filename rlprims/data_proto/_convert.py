"""Conversion to text and tables, and to and from a TensorDict."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rlprims._extras import package
from rlprims.data_proto._columns import (
    Array,
    BatchError,
    Columns,
    Jagged,
    batch_of,
    byte_count,
    check_tensor,
    dtype_text,
    object_array,
    row,
    shape_text,
)


def parts_of_tensordict(
    tensordict: TensorDict, meta_info: Mapping[Any, Any]
) -> tuple[Any, dict[str, Array], dict[Any, Any]]:
    """``batch``, ``non_tensor_batch`` and ``meta_info`` of what `to_tensordict` made."""
    if len(tensordict.batch_size) != 1:
        raise BatchError(f"from_tensordict: batch_size is {tuple(tensordict.batch_size)}, expected one dimension")
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


def to_tensordict(columns: Columns, meta_info: Mapping[Any, Any], device: Any) -> TensorDict:
    tensors, arrays, rows = columns
    twice = sorted(str(key) for key in meta_info if key in tensors or key in arrays or not isinstance(key, str))
    if twice:
        raise BatchError(f"to_tensordict: metadata {twice}, expected strings that no column has; rename or drop them")
    result = batch_of(tensors, rows or 0, device)
    for name, array in arrays.items():
        try:
            result[name] = NonTensorStack(*[NonTensorData(cell) for cell in array])
        except IndexError as error:
            fix = f"drop {name!r} with select, or install a newer one"
            raise BatchError(f"to_tensordict: this tensordict has no object column of zero rows; {fix}") from error
    for key, value in meta_info.items():
        result[key] = NonTensorData(value, batch_size=result.batch_size)
    return result


def to_pandas(columns: Columns) -> Any:
    pandas = package("pandas", "pandas", "to_pandas")
    cells = {name: _one_per_row(column) for name, column in columns.by_name().items()}
    series = {name: pandas.Series(column, dtype=column.dtype) for name, column in cells.items()}
    return pandas.DataFrame(series, index=pandas.RangeIndex(columns.rows or 0))


def to_arrow(columns: Columns) -> Any:
    arrow = package("pyarrow", "pyarrow", "to_arrow")
    table = {}
    for name, column in columns.by_name().items():
        try:
            table[name] = _arrow_column(arrow, column)
        except (arrow.ArrowException, ValueError, TypeError, OverflowError) as error:
            fix = "convert it, or drop it with select"
            raise BatchError(f"to_arrow: {name} has no Arrow type: {error}; {fix}") from error
    return arrow.table(table)


def _numbers(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    no_numpy = tensor.is_floating_point() and torch.finfo(tensor.dtype).bits < 32 and tensor.dtype != torch.float16
    numbers: Array = (tensor.float() if no_numpy else tensor).numpy()
    return numbers


def _one_per_row(column: Tensor | Array) -> Array:
    """A column as an array of one dimension, of numbers or of objects."""
    if isinstance(column, Tensor) and column.is_nested:
        return object_array([row(column, index).tolist() for index in range(column.shape[0])])
    array = _numbers(column) if isinstance(column, Tensor) else column
    if array.ndim == 1 and array.dtype.kind in "biufcmM":
        return array
    nested = np.ndarray | np.generic | Tensor
    return object_array([cell.tolist() if isinstance(cell, nested) else cell for cell in array])


def _arrow_column(arrow: Any, column: Tensor | Array) -> Any:
    if isinstance(column, Tensor) and column.is_nested:
        values, offsets, _, dim = Jagged.packed(column)
        if dim == 1:
            rows = _arrow_column(arrow, values)
            return arrow.LargeListArray.from_arrays(arrow.array(_numbers(offsets.long())), rows)
        return arrow.array(_one_per_row(column).tolist())
    array = _numbers(column) if isinstance(column, Tensor) else column
    if array.dtype == object:
        return arrow.array(_one_per_row(array).tolist())
    result = arrow.array(array.reshape(-1))
    # From the innermost dimension outwards, each dimension adds a level of lists of fixed size.
    for dim in range(array.ndim - 1, 0, -1):
        lists = math.prod(array.shape[:dim])
        result = arrow.LargeListArray.from_arrays(arrow.array(np.arange(lists + 1) * array.shape[dim]), result)
    return result


def table(
    title: str, rows: int, batch: Mapping[str, Tensor], non_tensor_batch: Mapping[str, Array], meta_info: dict[Any, Any]
) -> str:
    """A line for each field: part, name, dtype, shape, bytes."""
    lines, total = [], 0
    for part, columns in (("batch", batch), ("non_tensor_batch", non_tensor_batch)):
        for name, column in columns.items():
            size = byte_count(column)
            total += size
            lines.append((part, str(name), dtype_text(column), shape_text(column.shape), bytes_text(size)))
    for key, value in meta_info.items():
        text = repr(value).replace("\n", " ")
        lines.append(("meta_info", str(key), type(value).__name__, text if len(text) <= 60 else text[:57] + "...", ""))
    # The last cell of a line is not counted, because a long value must not widen all lines.
    widths = [max((len(line[i]) for line in lines if any(line[i + 1 :])), default=0) for i in range(5)]
    cells = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join([f"{title}: {rows} rows, {bytes_text(total)}", *("  " + "  ".join(c).rstrip() for c in cells)])


def bytes_text(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
