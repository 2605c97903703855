"""What a reader sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlprims.data_proto._columns import byte_count, dtype_text, shape_text

if TYPE_CHECKING:
    from rlprims.data_proto._container import DataProto


def _bytes_text(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def _short(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."


def get_data_info(data: DataProto) -> str:
    """A table of the fields: part, name, dtype, shape, bytes. This is also what a notebook shows.

    Bytes of an object column count its pointers and the arrays in it, not other objects.

    >>> import torch
    >>> from rlprims.data_proto import DataProto
    >>> DataProto.from_dict({"ids": torch.arange(3)}, meta_info={"step": 1})
    DataProto: 3 rows, 24 B
      batch      ids   int64  (3,)  24 B
      meta_info  step  int    1
    """
    # A container that does not fit together must still be shown, so nothing is checked here.
    parts = {"batch": {} if data.batch is None else data.batch, "non_tensor_batch": data.non_tensor_batch}
    lines, total = [], 0
    for part, columns in parts.items():
        for name, column in columns.items():
            size = byte_count(column)
            total += size
            lines.append((part, str(name), dtype_text(column), shape_text(column), _bytes_text(size)))
    lines += [("meta_info", str(key), type(value).__name__, _short(value), "") for key, value in data.meta_info.items()]
    # A long value in the last used place must not push every line apart.
    widths = [
        max((len(line[i]) for line in lines if line[i + 1 :] and any(line[i + 1 :])), default=0) for i in range(5)
    ]
    table = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    return "\n".join([f"{type(data).__name__}: {len(data)} rows, {_bytes_text(total)}", *table])


def print_size(data: DataProto, prefix: str = "") -> str:
    """How large the parts are, as a text to print or to log.

    >>> import torch
    >>> from rlprims.data_proto import DataProto
    >>> DataProto.from_dict({"ids": torch.arange(3)}, {"uid": ["a", "b", "c"]}).print_size("rollout")
    'rollout: batch 24 B, non_tensor_batch 24 B'
    """
    tensors = sum(byte_count(tensor) for tensor in data.batch.values()) if data.batch is not None else 0
    arrays = sum(byte_count(array) for array in data.non_tensor_batch.values())
    return f"{prefix}: batch {_bytes_text(tensors)}, non_tensor_batch {_bytes_text(arrays)}".removeprefix(": ")
