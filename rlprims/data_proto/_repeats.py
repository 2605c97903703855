"""More rows of the same: repeats of all rows, and padding to a number that divides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlprims.data_proto import _columns
from rlprims.data_proto._columns import Array
from rlprims.data_proto._errors import BatchError
from rlprims.data_proto._parts import D, columns, derived, fields
from rlprims.data_proto._rows import gather, run, upto


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
        raise BatchError(f"repeat: repeat_times is {repeat_times}, it needs to be at least 0")
    if repeat_times == 1:
        return run(data, 0, len(data))
    tensors, arrays, rows = columns(data)
    numbers = upto(rows or 0)
    numbers = numbers.repeat_interleave(repeat_times) if interleave else numbers.repeat(repeat_times)
    return derived(
        data,
        {name: _columns.take(tensor, numbers) for name, tensor in tensors.items()},
        {name: array[numbers.numpy()] for name, array in arrays.items()},
        None if rows is None else numbers.numel(),
    )


def sample_level_repeat(data: D, repeat_times: Sequence[int] | Array | Tensor) -> D:
    """Every row its own number of times, 0 included.

    Raises:
        BatchError: not one number per row, or a negative one.

    >>> from rlprims.data_proto import DataProto
    >>> DataProto.from_dict({"ids": torch.arange(3)}).sample_level_repeat([2, 0, 1])["ids"].tolist()
    [0, 0, 2]
    """
    try:
        times = torch.as_tensor(repeat_times, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        times = torch.empty(())  # no numbers at all: refused below
    if times.shape != (len(data),) or (times.numel() and (times.is_floating_point() or int(times.min()) < 0)):
        raise BatchError(
            f"sample_level_repeat: got {repeat_times!r} for {len(data)} rows; give one integer per row, at least 0"
        )
    return gather(data, upto(len(data)).repeat_interleave(times.long()))


def padding(data: D, padding_size: int, padding_candidate: str = "last") -> D:
    """The batch with ``padding_size`` more rows at the end, copies of its "first" or its "last" row.

    Raises:
        BatchError: a negative size, another candidate, or no row to copy.

    >>> from rlprims.data_proto import DataProto
    >>> DataProto.from_dict({"ids": torch.arange(2)}).padding(2, "first")["ids"].tolist()
    [0, 1, 0, 0]
    """
    rows = len(data)
    if padding_size < 0 or padding_candidate not in ("first", "last"):
        raise BatchError(
            f"padding: got size {padding_size} and candidate {padding_candidate!r}; give a size of at "
            "least 0, and 'first' or 'last'"
        )
    if padding_size and not rows:
        raise BatchError(f"padding: a batch without rows has none to copy {padding_size} times; {fields(data)}")
    return _extended(data, torch.full((padding_size,), 0 if padding_candidate == "first" else rows - 1, device="cpu"))


def pad_dataproto_to_divisor(data: D, size_divisor: int) -> tuple[D, int]:
    """A batch whose rows divide evenly, and how many rows were added: its own from the start, round and round.

    Zero rows stay zero rows. `unpad_dataproto` takes the added rows off.

    Raises:
        BatchError: a divisor below 1.

    >>> from rlprims.data_proto import DataProto
    >>> padded, added = DataProto.from_dict({"ids": torch.arange(3)}).pad_to_divisor(4)
    >>> padded["ids"].tolist(), added, padded.unpad(added)["ids"].tolist()
    ([0, 1, 2, 0], 1, [0, 1, 2])
    """
    if size_divisor < 1:
        raise BatchError(f"pad_to_divisor: size_divisor is {size_divisor}, it needs to be at least 1")
    rows = len(data)
    added = -rows % size_divisor
    return _extended(data, upto(added) % max(rows, 1)), added


def unpad_dataproto(data: D, pad_size: int) -> D:
    """The batch without its last ``pad_size`` rows.

    Raises:
        BatchError: fewer rows than that, or a negative number.

    >>> from rlprims.data_proto import DataProto
    >>> DataProto.from_dict({"ids": torch.arange(3)}).unpad(1)["ids"].tolist()
    [0, 1]
    """
    if not 0 <= pad_size <= len(data):
        raise BatchError(f"unpad: cannot take {pad_size} rows off {len(data)}; pass what pad_to_divisor returned")
    return run(data, 0, len(data) - pad_size)


def _extended(data: D, numbers: Tensor) -> D:
    """All rows, and after them those with these numbers: one copy of everything, or views where none are added."""
    if not numbers.numel():
        return run(data, 0, len(data))
    tensors, arrays, rows = columns(data)
    return derived(
        data,
        {name: _columns.join(name, [tensor, _columns.take(tensor, numbers)]) for name, tensor in tensors.items()},
        {name: np.concatenate([array, array[numbers.numpy()]]) for name, array in arrays.items()},
        (rows or 0) + numbers.numel(),
    )
