"""Units of work that stay in one part, single rows or whole groups, and their division into parts of nearly equal work.

Each function of a division gets the work of the units and returns the part of each unit.
"""

import heapq
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
    """The lengths as int64 (B,); ``ValueError`` if they are not integers (B,), or one is negative."""
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


PATIENCE = 6
"""Exchanges stop after this many rounds in which the heaviest part did not become lighter."""


def longest_first(work: Integers, parts: int) -> Integers:
    """Give each item, longest first, to the lightest part: LPT, Graham 1969."""
    order = np.argsort(-work, kind="stable")
    lightest = [(0, part) for part in range(parts)]
    owners = np.empty(len(work), np.int64)
    for item, item_work in zip(order.tolist(), work[order].tolist(), strict=True):
        load, part = lightest[0]
        owners[item] = part
        heapq.heapreplace(lightest, (load + item_work, part))
    return owners


def longest_first_in_rounds(work: Integers, parts: int) -> Integers:
    """Give one item to each part in every round, the longest of the round to the lightest part; equal sizes."""
    owners, loads = np.empty_like(work), np.zeros(parts, np.int64)
    for items in np.argsort(-work, kind="stable").reshape(-1, parts):
        lightest_first = np.argsort(loads, kind="stable")
        owners[items] = lightest_first
        loads[lightest_first] += work[items]
    return owners


def karmarkar_karp(work: Integers, parts: int, *, equal_size: bool) -> Integers:
    """The part of each item, by Karmarkar and Karp 1982, for any number of parts.

    A state is a tuple of sums, one for each part, largest first. The two states with the widest spread are merged,
    largest sum with smallest, until one is left. Each initial state is one item and zeros, or ``parts`` items of
    similar work if the parts must have equal sizes. Then the items get their parts, from the last merge to the first.
    """
    order = np.argsort(-work, kind="stable")
    if equal_size:
        seeds = order.reshape(-1, parts)
        sums = [work[seed] for seed in seeds]
    else:
        seeds = order[:, None]
        sums = [np.pad(work[seed], (0, parts - 1)) for seed in seeds]
    heap = [(int(s[-1] - s[0]), i) for i, s in enumerate(sums)]
    heapq.heapify(heap)
    merges = []
    while len(heap) > 1:
        (_, a), (_, b) = heapq.heappop(heap), heapq.heappop(heap)
        merged = sums[a] + sums[b][::-1]
        rank = np.argsort(-merged, kind="stable")
        merges.append((a, b, rank))
        sums[a] = merged[rank]
        heapq.heappush(heap, (int(sums[a][-1] - sums[a][0]), a))
    places = {heap[0][1]: np.arange(parts)}
    for a, b, rank in reversed(merges):
        place = np.empty(parts, np.int64)
        place[rank] = places[a]
        places[a], places[b] = place, place[::-1]
    owners = np.empty(len(work), np.int64)
    for i, seed in enumerate(seeds):
        owners[seed] = places[i][: len(seed)]
    return owners


def rebalance(work: Integers, owners: Integers, parts: int, *, equal_size: bool) -> Integers:
    """The same parts after exchanges: no part of the result is heavier than the heaviest before.

    In each round the heaviest part is paired with the lightest, the second heaviest with the second lightest and so on.
    Each pair exchanges the two items whose difference is nearest to half of the gap between the parts; if sizes may
    differ, an item may also move without one in return. After a round without success all parts are paired anew.
    """
    owners = owners.copy()
    loads = np.zeros(parts, np.int64)
    np.add.at(loads, owners, work)
    bound = max(-(-int(work.sum()) // parts), int(work.max()))
    heaviest, rounds_without_success = int(loads.max()), 0
    while heaviest > bound and rounds_without_success < PATIENCE:
        exchange(work, owners, loads, equal_size, shift=rounds_without_success)
        rounds_without_success = rounds_without_success + 1 if loads.max() == heaviest else 0
        heaviest = int(loads.max())
    return owners


def exchange(work: Integers, owners: Integers, loads: Integers, equal_size: bool, shift: int) -> None:
    """One round of exchanges; writes to ``owners`` and ``loads``."""
    pairs = len(loads) // 2
    rank = np.argsort(loads, kind="stable")
    light_part, heavy_part = np.roll(rank[:pairs], shift), rank[::-1][:pairs]
    gap = loads[heavy_part] - loads[light_part]
    pair_of_heavy, pair_of_light = np.full((2, len(loads)), -1)
    pair_of_heavy[heavy_part], pair_of_light[light_part] = np.arange(pairs), np.arange(pairs)

    heavy_items = np.flatnonzero(pair_of_heavy[owners] >= 0)
    light_items = np.flatnonzero(pair_of_light[owners] >= 0)
    heavy_pair, light_pair = pair_of_heavy[owners[heavy_items]], pair_of_light[owners[light_items]]
    light_work = work[light_items]
    if not equal_size:  # an item may move without one in return: add an item of no work, number -1, for each pair
        light_items = np.concatenate([light_items, np.full(pairs, -1)])
        light_pair, light_work = np.concatenate([light_pair, np.arange(pairs)]), np.pad(light_work, (0, pairs))

    # For each heavy item only two of the pair's light items can be the best: the neighbours of the ideal work.
    width = int(work.max()) + 1
    key = light_pair * width + light_work
    order = np.argsort(key, kind="stable")
    ideal_work = np.maximum(work[heavy_items] - gap[heavy_pair] // 2, 0)
    place = np.searchsorted(key[order], heavy_pair * width + ideal_work)
    candidates = order[np.stack([place - 1, place]).clip(0, len(order) - 1)]
    new_gap = np.abs(gap[heavy_pair] - 2 * (work[heavy_items] - light_work[candidates]))
    new_gap = np.where(light_pair[candidates] == heavy_pair, new_gap, gap[heavy_pair])
    better = new_gap.argmin(0)
    new_gap = new_gap.min(0)

    # The best exchange of each pair, if it makes the gap smaller.
    best = np.lexsort((new_gap, heavy_pair))
    best = best[np.unique(heavy_pair[best], return_index=True)[1]]
    best = best[new_gap[best] < gap[heavy_pair[best]]]
    partner = candidates[better[best], best]
    to_light, to_heavy, pair = heavy_items[best], light_items[partner], heavy_pair[best]
    moved_work = work[to_light] - light_work[partner]
    owners[to_heavy[to_heavy >= 0]] = heavy_part[pair[to_heavy >= 0]]
    owners[to_light] = light_part[pair]
    loads[heavy_part[pair]] -= moved_work
    loads[light_part[pair]] += moved_work
