"""Division of rows into micro-batches within a budget of tokens, padded or packed, and the way back to row order."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain

import numpy as np

from rlprims.batching._partition import Integers, checked_lengths, rows_of_units, units_of


def micro_batches(
    lengths: Sequence[int],
    response_lengths: Sequence[int] | None = None,
    group_ids: Sequence[Hashable] | None = None,
    *,
    max_tokens: int,
) -> list[list[int]]:
    """Divide rows into micro-batches whose padded size, rows x width, is at most ``max_tokens``.

    Rows are sorted by length, longest first, so that a micro-batch has rows of similar length and little padding. Every
    row is in exactly one micro-batch. With aggregations that take ``totals`` the split does not change the step.

    Args:
        lengths: tokens of each row; of its prompt, if ``response_lengths`` is given.
        response_lengths: tokens of each row's response. Prompts are padded on the left and responses on the right, so a
            micro-batch is as wide as its longest prompt and its longest response together.
        group_ids: a label for each row; rows of one label stay in one micro-batch. None: no constraint.
        max_tokens: budget of one micro-batch, including padding.

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
        unit_name = f"row {units[worst][0]}" if group_ids is None else f"the group of row {units[worst][0]}"
        fix = "raise the budget, or shorten prompts or responses"
        raise ValueError(f"{unit_name} has {sizes[worst]} tokens, more than max_tokens={max_tokens}: {fix}")
    batches: list[list[int]] = []
    prompt_width = response_width = 0
    for unit in sorted(range(len(units)), key=lambda unit: -sum(widths[unit])):
        new_widths = max(prompt_width, widths[unit][0]), max(response_width, widths[unit][1])
        if batches and (len(batches[-1]) + len(units[unit])) * sum(new_widths) <= max_tokens:
            batches[-1] += units[unit]
            prompt_width, response_width = new_widths
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
    """Divide rows into few parts of at most ``max_tokens`` each: packed micro-batches, without padding.

    The method is best fit decreasing: rows, longest first, go into the fullest part in which they fit. The number of
    parts is at most 11/9 of the smallest possible one plus a constant; for usual lengths it is the smallest one.
    :func:`micro_batches` is for batches that are padded.

    Args:
        group_ids: a label for each row; rows of one label stay in one part. None: no constraint.
        max_tokens: budget of one part.
        min_parts: the smallest number of parts. If all ranks must make equally many, give the largest that one needs.

    Returns:
        row numbers of each part, each ascending; no part is empty.

    Raises:
        ValueError: negative lengths; a row (or group) is longer than the budget; fewer rows (or groups) than min_parts.

    >>> pack([5, 9, 2, 5], max_tokens=10)
    [[1], [0, 3], [2]]
    """
    units = units_of(lengths, group_ids)
    work, of_row = units
    if len(work) and work.max() > max_tokens:
        worst = int(work.argmax())
        unit_name = f"row {worst}" if group_ids is None else f"the group of row {int((of_row == worst).argmax())}"
        raise ValueError(f"{unit_name} has {work[worst]} tokens, more than max_tokens={max_tokens}: raise the budget")
    if min_parts > max(len(work), 1):
        most = f"{len(work)}, the number of rows or groups"
        raise ValueError(f"min_parts={min_parts}, expected at most {most}: no part may be empty")
    parts = _best_fit(work, max_tokens)
    while len(parts) < min_parts and len(work):
        # A part lists its units longest first, so every second unit together is about half of its work.
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
    """The position of each row in the concatenated parts, so that ``out[restore_order(parts)]`` is in row order.

    Raises:
        ValueError: the parts do not hold every row exactly once.

    >>> parts = [[1, 3], [0, 2]]
    >>> out = ["b", "d", "a", "c"]
    >>> [out[position] for position in restore_order(parts)]
    ['a', 'b', 'c', 'd']
    """
    rows = [row for part in parts for row in part]
    positions: list[int] = np.argsort(rows, kind="stable").tolist()
    if any(rows[position] != row for row, position in enumerate(positions)):
        raise ValueError(f"expected parts with each of the rows 0 to {len(rows) - 1} exactly once, got {parts}")
    return positions
