"""Group labels as trainers have them: one string object for each prompt, shared by its samples."""

from random import Random
from uuid import UUID

import numpy as np


def uids(rows: int, group: int, *, shuffled: bool) -> np.ndarray:
    """Random hexadecimal names in an object array, ``group`` rows each."""
    random = Random(0)
    names = [str(UUID(int=random.getrandbits(128), version=4)) for _ in range(rows // group)]
    return _spread(np.array(names, dtype=object), group, shuffled)


def numbers(rows: int, group: int, *, shuffled: bool) -> np.ndarray:
    """0, 1, ... in int64."""
    return _spread(np.arange(rows // group), group, shuffled)


def _spread(names: np.ndarray, group: int, shuffled: bool) -> np.ndarray:
    labels = np.repeat(names, group)
    return labels[np.random.default_rng(0).permutation(len(labels))] if shuffled else labels
