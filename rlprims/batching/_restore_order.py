"""See :func:`restore_order`."""

from collections.abc import Iterable, Sequence

import numpy as np


def restore_order(parts: Iterable[Sequence[int]]) -> list[int]:
    """Where each row went: if ``out`` holds the parts' results end to end, ``out[restore_order(parts)]`` is by row.

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
