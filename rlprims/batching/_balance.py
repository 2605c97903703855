"""See :func:`balance`."""

import heapq
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from rlprims.batching._exchange import even_out
from rlprims.batching._karmarkar_karp import karmarkar_karp
from rlprims.batching._units import Integers, units


def balance(
    lengths: Sequence[int] | Integers,
    parts: int,
    group_ids: Sequence[Hashable] | None = None,
    *,
    equal_size: bool = False,
    method: Literal["longest_first", "karmarkar_karp"] | None = None,
) -> list[list[int]]:
    """Rows into ``parts`` of nearly equal work, for ranks that must wait for the slowest.

    A start is made by ``method``, then heavy and light parts exchange rows for as long as the heaviest becomes lighter.
    "longest_first" gives the longest row left to the lightest part (LPT, Graham 1969: at most a third above the
    optimum); with equal sizes it deals in rounds, the longest rows of a round to the lightest parts. "karmarkar_karp"
    is the largest differencing method, as in verl, slime and OpenRLHF. After the exchanges one is as good as the other,
    so None takes the faster: differencing if sizes are equal, longest first if not.

    Args:
        lengths: work of each row, in any unit: its tokens, or :func:`attention_workload` of them.
        parts: how many.
        group_ids: a label for each row; rows of one label stay in one part. None: every row is free.
        equal_size: every part has the same number of rows.
        method: how the start is made; None: the faster.

    Returns:
        row numbers of each part, each ascending; no part is empty.

    Raises:
        ValueError: fewer rows (or groups) than parts; equal_size, and rows that cannot be divided equally.

    >>> balance([9, 1, 5, 5], 2)
    [[0, 1], [2, 3]]
    >>> balance([9, 8, 1, 1, 1, 2], 2, equal_size=True)
    [[0, 2, 4], [1, 3, 5]]
    >>> balance([3, 3, 4, 4], 2, group_ids=["a", "a", "b", "b"])
    [[2, 3], [0, 1]]
    """
    if method is None:
        method = "karmarkar_karp" if equal_size else "longest_first"
    if method not in ("longest_first", "karmarkar_karp"):
        raise ValueError(f"method is {method!r}, needs 'longest_first', 'karmarkar_karp' or None")
    work, of_row = whole = units(lengths, group_ids)
    if not 1 <= parts <= len(work):
        raise ValueError(f"parts={parts} needs at least 1 and at most {len(work)}, the number of rows or groups")
    if equal_size:
        sizes = np.bincount(of_row)
        if (sizes != sizes[0]).any() or len(work) % parts:
            raise ValueError(
                f"equal_size: {len(of_row)} rows in {len(work)} units of {sizes.min()} to {sizes.max()} cannot be "
                f"divided into {parts} equal parts: pad the batch to a multiple"
            )
    some = np.maximum(work, 1)  # a row of no work still fills a part
    if method == "karmarkar_karp":
        owners = karmarkar_karp(some, parts, equal_size=equal_size)
    else:
        owners = (_deal if equal_size else _longest_first)(some, parts)
    return whole.rows(even_out(work, owners, parts, equal_size=equal_size), parts)


def _longest_first(work: Integers, parts: int) -> Integers:
    order = np.argsort(-work, kind="stable")
    lightest = [(0, part) for part in range(parts)]
    owners = []
    for more in work[order].tolist():
        load, part = lightest[0]
        owners.append(part)
        heapq.heapreplace(lightest, (load + more, part))
    return np.array(owners)[np.argsort(order)]


def _deal(work: Integers, parts: int) -> Integers:
    owners, loads = np.empty_like(work), np.zeros(parts, np.int64)
    for hand in np.argsort(-work, kind="stable").reshape(-1, parts):
        lightest = np.argsort(loads, kind="stable")
        owners[hand] = lightest
        loads[lightest] += work[hand]
    return owners
