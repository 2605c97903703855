"""A batch as text."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlprims.data_proto._columns import Array, byte_count, dtype_text, shape_text


def bytes_text(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def _short(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."


def table(
    title: str,
    rows: int,
    batch: Mapping[str, Tensor],
    non_tensor_batch: Mapping[str, Array],
    meta_info: Mapping[Any, Any],
) -> str:
    """A line for each field: part, name, dtype, shape, bytes."""
    lines, total = [], 0
    for part, columns in (("batch", batch), ("non_tensor_batch", non_tensor_batch)):
        for name, column in columns.items():
            size = byte_count(column)
            total += size
            lines.append((part, str(name), dtype_text(column), shape_text(column), bytes_text(size)))
    lines += [("meta_info", str(key), type(value).__name__, _short(value), "") for key, value in meta_info.items()]
    # A long value in the last column must not widen all lines.
    widths = [
        max((len(line[i]) for line in lines if line[i + 1 :] and any(line[i + 1 :])), default=0) for i in range(5)
    ]
    table = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    return "\n".join([f"{title}: {rows} rows, {bytes_text(total)}", *table])
