"""What cannot be divided: single rows, or whole groups."""

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlprims.grouping import dense_ids

Integers = NDArray[np.int64]


class Units(NamedTuple):
    """Row i belongs to unit ``of_row[i]``; unit u has ``work[u]`` in all."""

    work: Integers
    of_row: Integers

    def rows(self, owners: Integers, parts: int) -> list[list[int]]:
        """The rows of each part, ascending, from the part of each unit."""
        owner = owners[self.of_row]
        ends = np.bincount(owner, minlength=parts).cumsum().tolist()
        rows: list[int] = np.argsort(owner, kind="stable").tolist()
        return [rows[begin:end] for begin, end in pairwise([0, *ends])]


def units(lengths: Sequence[int] | Integers, group_ids: Sequence[Hashable] | None) -> Units:
    """One unit for each row, or for each group."""
    work = np.asarray(lengths)
    if work.ndim != 1 or (work.size and work.dtype.kind not in "iu") or (work < 0).any():
        raise ValueError(f"lengths has shape {work.shape} and dtype {work.dtype}, needs integers (B,), none negative")
    work = work.astype(np.int64)
    if group_ids is None:
        return Units(work, np.arange(len(work)))
    if len(group_ids) != len(work):
        raise ValueError(f"{len(work)} lengths but {len(group_ids)} group_ids: one each")
    of_row = dense_ids(group_ids).numpy()
    total = np.zeros(int(of_row.max(initial=-1)) + 1, np.int64)
    np.add.at(total, of_row, work)
    return Units(total, of_row)
