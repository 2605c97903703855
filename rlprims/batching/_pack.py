"""See :func:`pack`."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from itertools import chain

import numpy as np

from rlprims.batching._units import Integers, units


def pack(
    lengths: Sequence[int] | Integers,
    group_ids: Sequence[Hashable] | None = None,
    *,
    max_tokens: int,
    min_parts: int = 1,
) -> list[list[int]]:
    """Rows into as few parts as possible of at most ``max_tokens`` together: packed micro-batches, without padding.

    Best fit decreasing: longest first, each into the fullest part that still has room. The number of parts is at most
    11/9 of the fewest possible plus a constant, and for lengths of the usual spread it is the fewest.
    :func:`micro_batches` is for batches that are padded.

    Args:
        lengths: tokens of each row.
        group_ids: a label for each row; rows of one label stay in one part. None: every row is free.
        max_tokens: budget of one part.
        min_parts: at least so many; where all ranks must make the same number of steps, the largest that one needs.

    Returns:
        row numbers of each part, each ascending; no part is empty.

    Raises:
        ValueError: a row (or group) is longer than the budget; fewer rows (or groups) than min_parts.

    >>> pack([5, 9, 2, 5], max_tokens=10)
    [[1], [0, 3], [2]]
    >>> pack([5, 9, 1, 5], max_tokens=10)
    [[1, 2], [0, 3]]
    """
    work, of_row = whole = units(lengths, group_ids)
    if len(work) and work.max() > max_tokens:
        worst = int(work.argmax())
        what = f"row {worst} has" if group_ids is None else f"the group of row {int((of_row == worst).argmax())} has"
        raise ValueError(f"{what} {work[worst]} tokens, more than max_tokens={max_tokens}: raise the budget")
    if min_parts > max(len(work), 1):
        raise ValueError(f"min_parts={min_parts} is more than the {len(work)} rows or groups: no part may be empty")
    parts = _best_fit(work, max_tokens)
    while len(parts) < min_parts and len(work):
        # Longest first inside a part too, so that every other unit is about half of it.
        fullest = max((part for part in parts if len(part) > 1), key=lambda part: work[part].sum())
        parts.append(fullest[1::2])
        del fullest[1::2]
    owners = np.empty(len(work), np.int64)
    owners[list(chain.from_iterable(parts))] = np.repeat(np.arange(len(parts)), list(map(len, parts)))
    return whole.rows(owners, len(parts))


def _best_fit(work: Integers, max_tokens: int) -> list[list[int]]:
    """The units of each part, in the order in which they were put there."""
    parts: list[list[int]] = []
    rooms: list[int] = []  # of each part: what is free, and its number in the low bits, for integers compare fast
    bits = len(work).bit_length()
    number = (1 << bits) - 1
    budget = int(min(max_tokens, work.sum()))  # a Python integer: numpy's could be too short for the bits
    order = np.argsort(-work, kind="stable")
    for unit, tokens in zip(order.tolist(), work[order].tolist(), strict=True):
        at = bisect_left(rooms, tokens << bits)
        if at < len(rooms):
            room = rooms.pop(at)
            parts[room & number].append(unit)
        else:
            room = budget << bits | len(parts)
            parts.append([unit])
        insort(rooms, room - (tokens << bits))
    return parts
