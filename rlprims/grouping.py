"""Groups of samples that answer the same prompt: ids from any labels, and statistics of a group for each of its rows.

``group_ids`` are int64 (B,) and dense: every id is below B, so that no accelerator is asked how large the largest is.
:func:`dense_ids` makes them from any labels. Statistics come back as (B,), each row its group's. ``valid_rows`` (bool
(B,)) leaves rows out of the statistics; they still receive their group's.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlprims._groups import (
    Groups,
    Numbers,
    checked_largest,
    constant,
    moments_of,
    on_groups,
    squares_of,
    variance_of,
    width_and_limit,
)
from rlprims.types import CuSeqlens, GroupIds, PerSequence, RowMask


def dense_ids(labels: Iterable[Hashable] | np.ndarray | Tensor) -> GroupIds:
    """Dense int64 ids in order of first appearance, from any hashable labels.

    Labels are names and never numbers: "1", "001", 1.25, 1.75 and -1 are five groups.

    Raises:
        ValueError: a label is NaN (it would equal nothing) or cannot be hashed.

    >>> dense_ids(["b", "a", "b", -1])
    tensor([0, 1, 0, 2])
    """
    if isinstance(labels, Tensor):
        labels = labels.numpy(force=True)
    try:
        if not isinstance(labels, np.ndarray) or labels.ndim != 1:
            labels = np.fromiter(labels, object)
        if labels.dtype.kind in "iu" and len(labels):
            return torch.from_numpy(_ids_of_integers(labels))
        return torch.from_numpy(_ids_of_names(labels))
    except TypeError as error:
        raise ValueError(f"labels must be hashable, one per row (strings, numbers, tuples): {error}") from None


def _ids_of_names(labels: NDArray[Any]) -> NDArray[np.int64]:
    """By a dictionary, which is asked once for each run of rows with one label."""
    same = labels
    if labels.dtype == object:  # one object has one name; that two objects may have it too is the dictionary's affair
        same = np.ndarray(labels.shape, np.intp, np.ascontiguousarray(labels))
    begins = _begins(same)
    few = 2 * np.count_nonzero(begins) < len(labels)
    names = (labels[begins] if few else labels).tolist()
    ids: dict[Hashable, Any] = dict.fromkeys(names) if few else {}
    codes = None  # if every run is a group
    if len(ids) < len(names):
        ids = defaultdict(count().__next__)
        codes = np.fromiter(map(ids.__getitem__, names), np.int64, len(names))
    if any(issubclass(kind, float) for kind in set(map(type, ids))) and any(name != name for name in ids):
        raise ValueError("labels contain NaN, which belongs to no group: give those rows a label or drop them")
    if codes is not None and not few:
        return codes
    runs = begins.cumsum()
    runs -= 1
    return runs if codes is None else codes[runs]


def _begins(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """True where a row's label is not that of the row before."""
    begins = np.ones(len(labels), np.bool_)
    np.not_equal(labels[1:], labels[:-1], out=begins[1:])
    return begins


def _ids_of_integers(labels: NDArray[Any]) -> NDArray[np.int64]:
    """The same without asking for names: by steps if they ascend, as sampled, or by look-up if they are near 0."""
    if np.logical_and.reduce(labels[1:] >= labels[:-1]):
        ids = _begins(labels).cumsum()
        ids -= 1
        return ids
    rows = labels.size
    smallest, largest = int(np.minimum.reduce(labels)), int(np.maximum.reduce(labels))
    if largest - smallest >= 4 * rows:
        return _ids_of_names(labels)
    if smallest < 0 or largest >= 4 * rows:
        labels, largest = labels - smallest, largest - smallest
    first = np.empty(largest + 1, np.int64)
    first.fill(rows)
    np.minimum.at(first, labels, np.arange(rows))
    begins = np.zeros(rows + 1, np.bool_)  # one more, for numbers in between that no row has
    begins[first] = True
    firsts = begins[:-1].nonzero()[0]
    first[labels[firsts]] = np.arange(firsts.size)
    return first.take(labels)


def check_group_ids(group_ids: GroupIds) -> None:
    """Raise ``ValueError`` unless the ids are int64 (B,) and below B."""
    checked_largest(group_ids)


def group_count(group_ids: GroupIds, valid_rows: RowMask | None = None) -> Tensor:
    """How many (valid) rows each row's group has: int64 (B,).

    >>> group_count(torch.tensor([0, 1, 0]))
    tensor([2, 1, 2])
    """
    return on_groups(lambda g: (g.rows(g.count()),), group_ids, valid_rows)[0]


def group_bounds(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None
) -> tuple[PerSequence, PerSequence]:
    """Smallest and largest value of each row's group, exact; 0 and 0 if no row of the group is valid.

    >>> group_bounds(torch.tensor([3.0, 1.0, 4.0]), torch.tensor([0, 1, 0]))
    (tensor([3., 1., 3.]), tensor([4., 1., 4.]))
    """
    low, high = on_groups(lambda g, x: (g.rows(g.low(x)), g.rows(g.high(x))), group_ids, valid_rows, x)
    return low, high


def group_range(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None) -> PerSequence:
    """Largest minus smallest value of each row's group.

    >>> group_range(torch.tensor([3.0, 1.0, 4.0]), torch.tensor([0, 1, 0]))
    tensor([1., 0., 1.])
    """
    low, high = group_bounds(x, group_ids, valid_rows)
    return high - low


def is_constant(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, tolerance: float = 1e-6
) -> RowMask:
    """True where the row's group has max - min <= tolerance * max(1, |max|, |min|); never for a group with a NaN.

    A range and not a std: the std of seven equal 0.1 is 1.4e-17, so ``std > 0`` calls that group varied.

    >>> is_constant(torch.tensor([0.1] * 7 + [0.0, 1.0]), torch.tensor([0] * 7 + [1] * 2)).tolist()
    [True, True, True, True, True, True, True, False, False]
    """

    return on_groups(lambda g, x: (g.rows(constant(g, x, tolerance)),), group_ids, valid_rows, x)[0]


def is_varied(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, tolerance: float = 1e-6
) -> RowMask:
    """True where the row's group has max - min > tolerance * max(1, |max|, |min|).

    The opposite of :func:`is_constant`, but for a group with a NaN, which is neither.

    >>> is_varied(torch.tensor([0.1, 0.1, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])).tolist()
    [False, False, True, True]
    """

    def varied(g: Groups, x: Numbers) -> tuple[Numbers]:
        width, limit = width_and_limit(g, x, tolerance)
        return (g.rows(width > limit),)

    return on_groups(varied, group_ids, valid_rows, x)[0]


def group_mean(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None) -> PerSequence:
    """Mean of each row's group, measured from one of its numbers so that equal values give exactly that value.

    >>> group_mean(torch.tensor([3.0, 1.0, 4.0]), torch.tensor([0, 1, 0]))
    tensor([3.5000, 1.0000, 3.5000])
    """

    def mean(g: Groups, x: Numbers) -> tuple[Numbers]:
        of = moments_of(g, x)
        return (g.rows(of.origin + of.mean_from_origin),)

    return on_groups(mean, group_ids, valid_rows, x)[0]


def group_centred(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None) -> PerSequence:
    """``x`` minus the mean of each row's group, both measured from one of the group's numbers.

    So a large common offset takes no digits away, where beside 1e5 a float32 mean is rounded to 1/128.

    >>> group_centred(torch.tensor([100001.0, 100002.0, 100004.0]), torch.zeros(3, dtype=torch.int64))
    tensor([-1.3333, -0.3333,  1.6667])
    """
    return on_groups(lambda g, x: (moments_of(g, x).centred,), group_ids, valid_rows, x)[0]


def group_std(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, ddof: int = 1) -> PerSequence:
    """Standard deviation of each row's group, two-pass, with divisor n - ddof; 0 if that is not positive.

    >>> group_std(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    def std(g: Groups, x: Numbers) -> tuple[Numbers]:
        of = moments_of(g, x)
        return (g.rows(variance_of(g, squares_of(g, of), of.size, ddof) ** 0.5),)

    return on_groups(std, group_ids, valid_rows, x)[0]


class Ranks(NamedTuple):
    """The rows of each group in the order of their numbers.

    ``order`` lists the rows, group after group and ascending inside each; group g is ``cu[g]:cu[g+1]`` of it.

    ``sizes`` (B,), of valid rows, and ``ranks`` (B,), from 0, are in that order too.
    """

    order: Tensor
    cu: CuSeqlens
    sizes: Tensor
    ranks: Tensor

    def sort(self, x: PerSequence) -> PerSequence:
        return x[self.order]

    def unsort(self, x: PerSequence) -> PerSequence:
        return torch.zeros_like(x).index_put((self.order,), x)


def group_ranks(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None) -> Ranks:
    """Equal numbers stand in the order of their rows; rows that are not valid stand last and are not in the sizes.

    >>> group_ranks(torch.tensor([3.0, 9.0, 1.0]), torch.tensor([0, 1, 0]))
    Ranks(order=tensor([2, 0, 1]), cu=tensor([0, 2, 3, 3]), sizes=tensor([2, 2, 1]), ranks=tensor([0, 1, 0]))
    """
    order = x.argsort(stable=True)
    if valid_rows is not None:
        order = order[(~valid_rows[order]).long().argsort(stable=True)]
    order = order[group_ids[order].argsort(stable=True)]
    counts = torch.zeros_like(group_ids).index_add(0, group_ids, torch.ones_like(group_ids))
    cu = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    ranks = torch.arange(len(x), device=x.device) - cu[group_ids[order]]
    return Ranks(order, cu, group_count(group_ids, valid_rows)[order], ranks)
