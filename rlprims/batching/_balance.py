"""Division of rows into parts of nearly equal work."""

from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

import numpy as np

from rlprims.batching._partition import (
    Integers,
    checked_lengths,
    karmarkar_karp,
    longest_first,
    longest_first_in_rounds,
    rebalance,
    units_of,
)
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
    """Divide rows into ``parts`` of nearly equal work, for ranks that must wait for the slowest one.

    ``method`` makes a first division. Then heavy and light parts exchange rows as long as the heaviest part becomes
    lighter. "longest_first" gives the longest remaining row to the lightest part (LPT, Graham 1969), with equal sizes
    in rounds. "karmarkar_karp" is the largest differencing method, as in verl, slime and OpenRLHF. After the exchanges
    both are equally good, so None uses the faster one: differencing if sizes are equal, else longest first.

    Args:
        lengths: work of each row, in any unit: its tokens, or :func:`attention_workload` of them.
        group_ids: a label for each row; rows of one label stay in one part. None: no constraint.
        equal_size: every part has the same number of rows.

    Returns:
        row numbers of each part, each ascending; no part is empty.

    Raises:
        ValueError: negative lengths; an unknown method; fewer rows (or groups) than parts; sizes that cannot be equal.

    >>> balance([9, 1, 5, 5], 2)
    [[0, 1], [2, 3]]
    >>> balance([3, 3, 4, 4], 2, group_ids=["a", "a", "b", "b"])
    [[2, 3], [0, 1]]
    """
    if method is None:
        method = "karmarkar_karp" if equal_size else "longest_first"
    check_choice("method", method, Method)
    units = units_of(lengths, group_ids)
    work = units.work
    if not 1 <= parts <= len(work):
        raise ValueError(f"parts={parts}, expected at least 1 and at most {len(work)}, the number of rows or groups")
    if equal_size:
        sizes = np.bincount(units.of_row)
        if (sizes != sizes[0]).any() or len(work) % parts:
            raise ValueError(
                f"equal_size=True with {len(units.of_row)} rows in {len(work)} units of {sizes.min()} to "
                f"{sizes.max()} rows, expected a number that {parts} equal parts divide: pad the batch to a multiple"
            )
    positive = np.maximum(work, 1)  # so that a row of no work counts, and no part is empty
    if method == "karmarkar_karp":
        owners = karmarkar_karp(positive, parts, equal_size=equal_size)
    elif equal_size:
        owners = longest_first_in_rounds(positive, parts)
    else:
        owners = longest_first(positive, parts)
    return units.rows(rebalance(work, owners, parts, equal_size=equal_size), parts)


def attention_workload(lengths: Sequence[int] | Integers, *, hidden_size: int = 4096) -> Integers:
    """The work of each row in a transformer, 6 h l + l², for :func:`balance` of long rows.

    A layer has 12 h² weights (24 h² l operations), and attention takes 4 h l² operations; divided by 4 h the sum is the
    formula. With h = 4096, a model of 7B, attention costs as much as the weights at 24576 tokens.

    Returns:
        int64 (B,); ``lengths`` are the tokens l of each row, and h is ``hidden_size``.

    Raises:
        ValueError: lengths that are negative or not integers.

    >>> attention_workload([1, 1000, 24576]).tolist()
    [24577, 25576000, 1207959552]
    """
    tokens = checked_lengths("lengths", lengths)
    return 6 * hidden_size * tokens + tokens**2
