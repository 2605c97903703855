"""Few combinations of settings in which every pair of values meets."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

Combination = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def pairs_of(combination: Mapping[str, Any]) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(combination.items(), 2)}


def cover(settings: Mapping[str, Sequence[Any]], allowed: Callable[[Combination], bool]) -> list[Combination]:
    """A greedy cover by allowed combinations; ``allowed`` also gets parts of a combination, and may not be stricter.

    Each combination begins with the first pair that has not met, and takes value by value what meets most others; of
    equals, what was taken least. Pairs that cannot meet are left out.
    """
    wanted = [{a: x, b: y} for a, b in combinations(settings, 2) for x in settings[a] for y in settings[b]]
    missing = {frozenset(pair.items()): pair for pair in wanted if allowed(pair)}
    found = list[Combination]()
    while missing:
        pair = next(iter(missing.values()))
        taken = Counter(value for row in found for value in row.items())
        row = _completed(pair, settings, missing, taken, allowed)
        for met in {frozenset(pair.items()), *(pairs_of(row) if row else ())}:
            missing.pop(met, None)
        if row:
            found.append(row)
    return found


def _completed(
    begun: Combination,
    settings: Mapping[str, Sequence[Any]],
    missing: Iterable[Pair],
    taken: Counter[tuple[str, Any]],
    allowed: Callable[[Combination], bool],
) -> Combination | None:
    """The combination with a value for every setting, by a search from the best values on; None: there is none."""
    name = next((name for name in settings if name not in begun), None)
    if name is None:
        return {name: begun[name] for name in settings}
    new = {value: begun | {name: value} for value in settings[name]}
    for value in sorted(new, key=lambda value: (-len(pairs_of(new[value]) & set(missing)), taken[name, value])):
        if allowed(new[value]) and (row := _completed(new[value], settings, missing, taken, allowed)):
            return row
    return None
