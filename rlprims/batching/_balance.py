"""Rows into parts of nearly equal work."""

from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

import numpy as np

from rlprims.batching._partition import karmarkar_karp, longest_first, longest_first_in_rounds, rebalance
from rlprims.batching._units import Integers, checked_lengths, units_of
from rlprims.masking import check_choice

Method: TypeAlias = Literal["longest_first", "karmarkar_karp"]


def balance(
    lengths: Sequence[int] | Integers,
    parts: int,
    group_ids: Sequence[Hashable] | None = None,
    *,
    equal_size: bool = False,
    method: Method | None = None,
) -> list[list[int]]:
    """Rows into ``parts`` of nearly equal work, for ranks that must wait for the slowest.

    ``method`` makes a first division. Then heavy and light parts exchange rows as long as the heaviest part becomes
    lighter. "longest_first" gives the longest remaining row to the lightest part (LPT, Graham 1969: at most a third
    above the optimum); with equal sizes it works in rounds and gives the longest rows of a round to the lightest parts.
    "karmarkar_karp" is the largest differencing method, as in verl, slime and OpenRLHF. After the exchanges both are
    equally good, so None takes the faster: differencing if sizes are equal, longest first if not.

    Args:
        lengths: work of each row, in any unit: its tokens, or :func:`attention_workload` of them.
        parts: how many.
        group_ids: a label for each row; rows of one label stay in one part. None: no constraint.
        equal_size: every part has the same number of rows.
        method: how the first division is made; None: the faster method.

    Returns:
        row numbers of each part, each ascending; no part is empty.

    Raises:
        ValueError: negative lengths; an unknown method; fewer rows (or groups) than parts; equal_size, and rows that
            cannot be divided equally.

    >>> balance([9, 1, 5, 5], 2)
    [[0, 1], [2, 3]]
    >>> balance([9, 8, 1, 1, 1, 2], 2, equal_size=True)
    [[0, 2, 4], [1, 3, 5]]
    >>> balance([3, 3, 4, 4], 2, group_ids=["a", "a", "b", "b"])
    [[2, 3], [0, 1]]
    """
    if method is None:
        method = "karmarkar_karp" if equal_size else "longest_first"
    check_choice("method", method, Method)
    units = units_of(lengths, group_ids)
    work = units.work
    if not 1 <= parts <= len(work):
        raise ValueError(f"parts={parts} must be at least 1 and at most {len(work)}, the number of rows or groups")
    if equal_size:
        sizes = np.bincount(units.of_row)
        if (sizes != sizes[0]).any() or len(work) % parts:
            raise ValueError(
                f"equal_size: {len(units.of_row)} rows in {len(work)} units of {sizes.min()} to {sizes.max()} cannot "
                f"be divided into {parts} equal parts: pad the batch to a multiple"
            )
    positive = np.maximum(work, 1)  # so that a row without work fills a part too
    if method == "karmarkar_karp":
        owners = karmarkar_karp(positive, parts, equal_size=equal_size)
    elif equal_size:
        owners = longest_first_in_rounds(positive, parts)
    else:
        owners = longest_first(positive, parts)
    return units.rows(rebalance(work, owners, parts, equal_size=equal_size), parts)


def attention_workload(lengths: Sequence[int] | Integers, *, hidden_size: int = 4096) -> Integers:
    """What each row costs a transformer, 6 h l + l²: work for :func:`balance` when rows are long.

    A layer multiplies with 12 h² weights (24 h² l operations) and attends to all tokens (4 h l²); over 4 h that is the
    formula. With h = 4096, a model of 7B, attention costs as much as the weights at 24576 tokens. Tokens alone are
    right for short rows.

    Args:
        lengths: tokens of each row.
        hidden_size: h.

    Returns:
        int64 (B,).

    Raises:
        ValueError: lengths that are negative or not integers.

    >>> attention_workload([1, 1000, 24576]).tolist()
    [24577, 25576000, 1207959552]
    """
    tokens = checked_lengths("lengths", lengths)
    return 6 * hidden_size * tokens + tokens**2
