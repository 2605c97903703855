"""Exchanges of items between heavy parts and light ones."""

import numpy as np

from rlprims.batching._units import Integers

PATIENCE = 6
"""Rounds in a row in which the heaviest part stays as heavy as it was, before we stop."""


def even_out(work: Integers, owners: Integers, parts: int, *, equal_size: bool) -> Integers:
    """The same parts with a smaller maximum: no part of the result is heavier than the heaviest before.

    In each round the heaviest part meets the lightest, the second heaviest the second lightest and so on. Each pair
    exchanges the two items whose difference is nearest to half of the gap between the parts; if sizes may differ, an
    item may also go over for nothing. After a round without success every heavy part meets another light one.
    """
    owners = owners.copy()
    loads = np.zeros(parts, np.int64)
    np.add.at(loads, owners, work)
    bound = max(-(-int(work.sum()) // parts), int(work.max()))
    heaviest, waited = int(loads.max()), 0
    while heaviest > bound and waited < PATIENCE:
        _exchange(work, owners, loads, equal_size, shift=waited)
        waited = waited + 1 if loads.max() == heaviest else 0
        heaviest = int(loads.max())
    return owners


def _exchange(work: Integers, owners: Integers, loads: Integers, equal_size: bool, shift: int) -> None:
    """One round, in place."""
    pairs = len(loads) // 2
    rank = np.argsort(loads, kind="stable")
    light, heavy = np.roll(rank[:pairs], shift), rank[::-1][:pairs]
    gap = loads[heavy] - loads[light]
    giver, taker = np.full((2, len(loads)), -1)
    giver[heavy], taker[light] = np.arange(pairs), np.arange(pairs)

    given = np.flatnonzero(giver[owners] >= 0)
    taken = np.flatnonzero(taker[owners] >= 0)
    pair, pair_of_taken, worth = giver[owners[given]], taker[owners[taken]], work[taken]
    if not equal_size:  # nothing, once for each pair, is an item of no work
        taken = np.concatenate([taken, np.full(pairs, -1)])
        pair_of_taken, worth = np.concatenate([pair_of_taken, np.arange(pairs)]), np.pad(worth, (0, pairs))

    # Of a pair's light items, sorted, only the two beside the ideal one can be the best partner.
    width = int(work.max()) + 1
    key = pair_of_taken * width + worth
    order = np.argsort(key, kind="stable")
    ideal = np.maximum(work[given] - gap[pair] // 2, 0)
    above = np.searchsorted(key[order], pair * width + ideal)
    beside = order[np.stack([above - 1, above]).clip(0, len(order) - 1)]
    left_over = np.abs(gap[pair] - 2 * (work[given] - worth[beside]))
    left_over = np.where(pair_of_taken[beside] == pair, left_over, gap[pair])
    nearest = left_over.argmin(0)
    left_over = left_over.min(0)

    best = np.lexsort((left_over, pair))
    best = best[np.unique(pair[best], return_index=True)[1]]
    best = best[left_over[best] < gap[pair[best]]]
    partner = beside[nearest[best], best]
    over, back, p = given[best], taken[partner], pair[best]
    moved = work[over] - worth[partner]
    owners[back[back >= 0]] = heavy[p[back >= 0]]
    owners[over] = light[p]
    loads[heavy[p]] -= moved
    loads[light[p]] += moved
