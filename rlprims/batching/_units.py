"""Units of work that stay in one part: single rows, or whole groups."""

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlprims.grouping import dense_ids, rows_by_label

Integers = NDArray[np.int64]


class Units(NamedTuple):
    """The unit of each row and the work of each unit: row i belongs to unit ``of_row[i]``, which has total ``work``."""

    work: Integers
    of_row: Integers

    def rows(self, owners: Integers, parts: int) -> list[list[int]]:
        """The rows of each part, ascending, from the part of each unit."""
        owner = owners[self.of_row]
        ends = np.bincount(owner, minlength=parts).cumsum().tolist()
        rows: list[int] = np.argsort(owner, kind="stable").tolist()
        return [rows[begin:end] for begin, end in pairwise([0, *ends])]


def checked_lengths(name: str, lengths: Sequence[int] | Integers) -> Integers:
    """The lengths as int64 (B,).

    Raises:
        ValueError: they are not integers (B,), or one is negative.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} has shape {array.shape} and dtype {array.dtype}, expected integers (B,)")
    if (array < 0).any():
        row = int((array < 0).argmax())
        raise ValueError(f"{name} is {array[row]} in row {row}, expected integers (B,) of at least 0")
    return array.astype(np.int64)


def units_of(lengths: Sequence[int] | Integers, group_ids: Sequence[Hashable] | None) -> Units:
    """One unit for each row, or for each group."""
    work = checked_lengths("lengths", lengths)
    if group_ids is None:
        return Units(work, np.arange(len(work)))
    if len(group_ids) != len(work):
        raise ValueError(f"{len(work)} lengths but {len(group_ids)} group_ids, expected one each")
    of_row = dense_ids(group_ids).numpy()
    total = np.zeros(int(of_row.max(initial=-1)) + 1, np.int64)
    np.add.at(total, of_row, work)
    return Units(total, of_row)


def rows_of_units(count: int, group_ids: Sequence[Hashable] | None) -> list[list[int]]:
    """The rows of each unit, ascending, units in the order of their first rows."""
    if group_ids is None:
        return [[row] for row in range(count)]
    if len(group_ids) != count:
        raise ValueError(f"{count} lengths but {len(group_ids)} group_ids, expected one each")
    return rows_by_label(group_ids)
