"""DAPO's dynamic sampling: which rows belong to a group whose scores differ.

Neither peer has it as a function. What is timed against are plain loops written here for the purpose, which do what
the published recipe does: np.std group by group, then a look-up row by row, in a list as there, or in a set.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks._harness import Case
from benchmarks._labels import numbers, uids
from rlprims import filters, grouping

SMALL = ((8192, 8, "str in order"), (8192, 8, "str shuffled"))
LARGE = ((131072, 8, "str shuffled"), (131072, 8, "int in order"))
LONGEST_LIST = 8192  # beyond it the search in a list takes seconds


def cases(quick: bool) -> Iterator[Case]:
    for rows, group, labels in SMALL if quick else SMALL + LARGE:
        yield _case(rows, group, labels)


def _case(rows: int, group: int, labels: str) -> Case:
    make = uids if labels.startswith("str") else numbers
    names = make(rows, group, shuffled=labels.endswith("shuffled"))
    scores = _scores(names)
    want = _by_range(names, scores.numpy())
    peers = {"plain loop, set": partial(_plain_loop, names, scores.numpy(), set)}
    if rows <= LONGEST_LIST:
        peers["plain loop, list"] = partial(_plain_loop, names, scores.numpy(), list)
    return Case(
        family="filter",
        name=f"{rows} g{group} {labels}",
        ours=partial(_ours, names, scores),
        peers=peers,
        error=lambda got: float(np.mean(np.asarray(got) != want)),
    )


def _scores(names: np.ndarray) -> Tensor:
    """Right or wrong; a third of the groups all wrong, a third all right."""
    random = np.random.default_rng(0)
    _, group = np.unique(names, return_inverse=True)
    kind = random.integers(0, 3, size=group.max() + 1)[group]
    mixed = random.integers(0, 2, size=len(names))
    return torch.from_numpy(np.where(kind == 2, mixed, kind).astype(np.float32))


def _ours(names: np.ndarray, scores: Tensor) -> Tensor:
    return filters.varied_scores(scores, grouping.dense_ids(names))


def _plain_loop(names: np.ndarray, scores: np.ndarray, collect: type[list] | type[set]) -> list[bool]:
    by_name = defaultdict(list)
    for name, score in zip(names, scores, strict=True):
        by_name[name].append(score)
    varied: Collection = collect(name for name, of_name in by_name.items() if np.std(of_name) > 0)
    return [name in varied for name in names]


def _by_range(names: np.ndarray, scores: np.ndarray) -> np.ndarray:
    _, group = np.unique(names, return_inverse=True)
    low, high = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(low, group, scores)
    np.maximum.at(high, group, scores)
    return (high > low)[group]
