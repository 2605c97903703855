"""The largest differencing method."""

import heapq

import numpy as np

from rlprims.batching._units import Integers


def karmarkar_karp(work: Integers, parts: int, *, equal_size: bool) -> Integers:
    """The part of each item, by Karmarkar and Karp 1982, for any number of parts.

    A state is a tuple of sums, one for each part, largest first. The two states with the widest spread are merged,
    largest sum with smallest, until one is left. A state begins as one item and zeros, or as ``parts`` items of like
    work if the parts must have equal numbers. What was merged with what is written down, and the items are dealt out
    from the last merge back to the first.
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
