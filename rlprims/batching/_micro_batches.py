"""Rows into micro-batches within a budget of tokens, padded or packed, and back to the order of the rows."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain

import numpy as np

from rlprims.batching._units import Integers, checked_lengths, rows_of_units, units_of


def micro_batches(
    lengths: Sequence[int],
    response_lengths: Sequence[int] | None = None,
    group_ids: Sequence[Hashable] | None = None,
    *,
    max_tokens: int,
) -> list[list[int]]:
    """Rows by length into micro-batches whose padded size, rows x width, is at most ``max_tokens``.

    Longest first, so that rows of similar length share a micro-batch and little of it is padding. Every row is in
    exactly one; with aggregations that take ``totals`` the split does not change the step.

    Args:
        lengths: tokens of each row; of its prompt, if ``response_lengths`` is given.
        response_lengths: tokens of each row's response. Prompts are padded on the left and responses on the right, so a
            micro-batch is as wide as its longest prompt and its longest response together.
        group_ids: a label for each row; rows of one label stay in one micro-batch. None: no constraint.
        max_tokens: budget of one micro-batch, padding counted.

    Returns:
        row numbers of each micro-batch, each ascending.

    Raises:
        ValueError: negative lengths; a row (or group) is longer than the budget, and the message names the row.

    >>> micro_batches([5, 9, 2, 5], max_tokens=10)
    [[1], [0, 3], [2]]
    >>> micro_batches([10, 1], [1, 10], max_tokens=22)
    [[0], [1]]
    """
    prompts: list[int] = checked_lengths("lengths", lengths).tolist()
    responses: list[int] = [0] * len(prompts)
    if response_lengths is not None:
        responses = checked_lengths("response_lengths", response_lengths).tolist()
    if len(responses) != len(prompts):
        raise ValueError(f"{len(prompts)} lengths but {len(responses)} response_lengths, expected one each")
    units = rows_of_units(len(prompts), group_ids)
    widths = [(max(prompts[row] for row in rows), max(responses[row] for row in rows)) for rows in units]
    sizes = [len(rows) * sum(width) for rows, width in zip(units, widths, strict=True)]
    if sizes and max(sizes) > max_tokens:
        worst = sizes.index(max(sizes))
        what = f"row {units[worst][0]} has" if group_ids is None else f"the group of row {units[worst][0]} has"
        raise ValueError(
            f"{what} {sizes[worst]} tokens, more than max_tokens={max_tokens}: raise the budget, "
            "or shorten prompts or responses"
        )
    batches: list[list[int]] = []
    prompt_width = response_width = 0
    for unit in sorted(range(len(units)), key=lambda unit: -sum(widths[unit])):
        wider = max(prompt_width, widths[unit][0]), max(response_width, widths[unit][1])
        if batches and (len(batches[-1]) + len(units[unit])) * sum(wider) <= max_tokens:
            batches[-1] += units[unit]
            prompt_width, response_width = wider
        else:
            batches.append(units[unit])
            prompt_width, response_width = widths[unit]
    return [sorted(batch) for batch in batches]


def pack(
    lengths: Sequence[int] | Integers,
    group_ids: Sequence[Hashable] | None = None,
    *,
    max_tokens: int,
    min_parts: int = 1,
) -> list[list[int]]:
    """Rows into as few parts as possible of at most ``max_tokens`` together: packed micro-batches, without padding.

    Best fit decreasing: longest first, each into the fullest part in which it fits. The number of parts is at most
    11/9 of the fewest possible plus a constant, and for lengths of the usual spread it is the fewest.
    :func:`micro_batches` is for batches that are padded.

    Args:
        lengths: tokens of each row.
        group_ids: a label for each row; rows of one label stay in one part. None: no constraint.
        max_tokens: budget of one part.
        min_parts: at least so many; where all ranks must make the same number of steps, the largest that one needs.

    Returns:
        row numbers of each part, each ascending; no part is empty.

    Raises:
        ValueError: negative lengths; a row (or group) is longer than the budget; fewer rows (or groups) than min_parts.

    >>> pack([5, 9, 2, 5], max_tokens=10)
    [[1], [0, 3], [2]]
    >>> pack([5, 9, 1, 5], max_tokens=10)
    [[1, 2], [0, 3]]
    """
    units = units_of(lengths, group_ids)
    work, of_row = units
    if len(work) and work.max() > max_tokens:
        worst = int(work.argmax())
        what = f"row {worst} has" if group_ids is None else f"the group of row {int((of_row == worst).argmax())} has"
        raise ValueError(f"{what} {work[worst]} tokens, more than max_tokens={max_tokens}: raise the budget")
    if min_parts > max(len(work), 1):
        raise ValueError(f"min_parts={min_parts} is more than the {len(work)} rows or groups: no part may be empty")
    parts = _best_fit(work, max_tokens)
    while len(parts) < min_parts and len(work):
        # A part lists its units longest first, so that every other unit is about half of its work.
        fullest = max((part for part in parts if len(part) > 1), key=lambda part: work[part].sum())
        parts.append(fullest[1::2])
        del fullest[1::2]
    owners = np.empty(len(work), np.int64)
    owners[list(chain.from_iterable(parts))] = np.repeat(np.arange(len(parts)), list(map(len, parts)))
    return units.rows(owners, len(parts))


def _best_fit(work: Integers, max_tokens: int) -> list[list[int]]:
    """The units of each part, in the order in which they were put there."""
    parts: list[list[int]] = []
    free_space: list[tuple[int, int]] = []  # (free tokens, part), ascending
    order = np.argsort(-work, kind="stable")
    for unit, tokens in zip(order.tolist(), work[order].tolist(), strict=True):
        fullest = bisect_left(free_space, (tokens, 0))
        if fullest < len(free_space):
            free, part = free_space.pop(fullest)
        else:
            free, part = max_tokens, len(parts)
            parts.append([])
        parts[part].append(unit)
        insort(free_space, (free - tokens, part))
    return parts


def restore_order(parts: Iterable[Sequence[int]]) -> list[int]:
    """The place of each row: if ``out`` holds the parts' results end to end, ``out[restore_order(parts)]`` is by row.

    Args:
        parts: row numbers of each part, as :func:`balance`, :func:`pack` and :func:`micro_batches` return them.

    Raises:
        ValueError: the parts do not hold every row exactly once.

    >>> parts = [[1, 3], [0, 2]]
    >>> out = ["b", "d", "a", "c"]
    >>> [out[place] for place in restore_order(parts)]
    ['a', 'b', 'c', 'd']
    """
    rows = [row for part in parts for row in part]
    places: list[int] = np.argsort(rows, kind="stable").tolist()
    if any(rows[place] != row for row, place in enumerate(places)):
        raise ValueError(f"the parts must hold each of the rows 0 to {len(rows) - 1} exactly once")
    return places
