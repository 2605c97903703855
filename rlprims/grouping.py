"""Groups of samples that answer the same prompt: ids from any labels, and statistics of a group for each of its rows.

``group_ids`` are int64 (B,) and dense: every id is below B, so that no buffer depends on their values and no device is
asked to synchronize. :func:`dense_ids` makes them from any labels. Statistics come back as (B,), each row its group's.
``valid_rows`` (bool (B,)) leaves rows out of the statistics; they still receive their group's.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import threshold

from rlprims.masking import upcast
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
    if isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu" and len(labels):
        smallest, largest = int(labels.min()), int(labels.max())
        if largest - smallest < 4 * len(labels):
            return _ids_of_integers(labels - smallest, largest - smallest + 1)
    names = labels.tolist() if isinstance(labels, np.ndarray) else labels
    ids: defaultdict[Hashable, int] = defaultdict(count().__next__)
    try:
        codes = np.fromiter(map(ids.__getitem__, names), np.int64)
    except TypeError as error:
        raise ValueError(f"labels must be hashable, one per row (strings, numbers, tuples): {error}") from None
    if any(isinstance(name, float) and math.isnan(name) for name in ids):
        raise ValueError("labels contain NaN, which belongs to no group: give those rows a label or drop them")
    return torch.from_numpy(codes)


def _ids_of_integers(labels: np.ndarray, size: int) -> GroupIds:
    """The same for integers in [0, size), by look-up."""
    steps = np.diff(labels, prepend=labels[:1])
    if steps.min() >= 0:  # groups stand one after the other, as they were sampled
        return torch.from_numpy(np.cumsum(steps > 0))
    rows = np.arange(len(labels))
    first = np.empty(size, np.int64)
    first[labels[::-1]] = rows[::-1]  # of equal labels the last write stays: the first row
    first_of_group = first[labels]
    return torch.from_numpy((np.cumsum(first_of_group == rows) - 1)[first_of_group])


def check_group_ids(group_ids: GroupIds) -> None:
    """Raise ``ValueError`` unless the ids are int64 (B,) and below B."""
    _largest(group_ids)


def _largest(group_ids: GroupIds) -> int | None:
    """The largest id, checked; None where it is not read."""
    if group_ids.dim() != 1 or group_ids.dtype is not torch.int64:
        raise ValueError(
            f"group_ids has shape {tuple(group_ids.shape)} and dtype {group_ids.dtype}, needs int64 (B,): "
            "use grouping.dense_ids(labels)"
        )
    # Reading values would stall an accelerator and break a traced graph; there index_add's own bounds check speaks.
    if group_ids.device.type != "cpu" or not len(group_ids) or torch.compiler.is_compiling():
        return None
    low, high = (int(bound) for bound in group_ids.aminmax())
    if low < 0 or high >= len(group_ids):
        raise ValueError(
            f"group_ids run from {low} to {high}, need 0 to at most {len(group_ids) - 1}, the rows less one: "
            "use grouping.dense_ids(labels)"
        )
    return high


class _Groups(NamedTuple):
    """The ids; and how many rows each group has if they stand together and are as many in all, as sampled, else 0."""

    ids: GroupIds
    run: int


def _checked(group_ids: GroupIds, valid_rows: RowMask | None) -> _Groups:
    largest = _largest(group_ids)
    if valid_rows is not None and (valid_rows.shape != group_ids.shape or valid_rows.dtype is not torch.bool):
        raise ValueError(
            f"valid_rows has shape {tuple(valid_rows.shape)} and dtype {valid_rows.dtype}, "
            f"needs bool ({len(group_ids)},): one answer per row"
        )
    if largest is None or len(group_ids) % (largest + 1):
        return _Groups(group_ids, 0)
    together = group_ids.reshape(largest + 1, -1) == torch.arange(largest + 1)[:, None]
    return _Groups(group_ids, together.shape[1] if bool(together.all()) else 0)


# Below, what begins with an underscore has one entry per id; ``_to_rows`` gives each row its group's.


def _to_rows(x: Tensor, groups: _Groups) -> PerSequence:
    return x.repeat_interleave(groups.run) if groups.run else x.index_select(0, groups.ids)


def _sum(x: Tensor, groups: _Groups) -> Tensor:
    if groups.run:
        return x.view(-1, groups.run).sum(-1)
    return torch.zeros_like(x).scatter_add_(0, groups.ids, x)


def _count(groups: _Groups, valid_rows: RowMask | None) -> Tensor:
    return _sum(torch.ones_like(groups.ids) if valid_rows is None else valid_rows.long(), groups)


def _bounds(x: Tensor, groups: _Groups, valid_rows: RowMask | None) -> tuple[Tensor, Tensor]:
    not_below, not_above = _valid(x, valid_rows, torch.inf), _valid(x, valid_rows, -torch.inf)
    if groups.run:
        low, high = not_below.view(-1, groups.run).amin(-1), not_above.view(-1, groups.run).amax(-1)
    else:
        low = torch.full_like(x, torch.inf).scatter_reduce_(0, groups.ids, not_below, "amin")
        high = torch.full_like(x, -torch.inf).scatter_reduce_(0, groups.ids, not_above, "amax")
    if valid_rows is None:
        return low, high
    some = _count(groups, valid_rows) > 0
    return torch.where(some, low, 0.0), torch.where(some, high, 0.0)


def _valid(x: Tensor, valid_rows: RowMask | None, otherwise: float = 0.0) -> Tensor:
    return x if valid_rows is None else torch.where(valid_rows, x, otherwise)


def group_count(group_ids: GroupIds, valid_rows: RowMask | None = None) -> Tensor:
    """How many (valid) rows each row's group has: int64 (B,).

    >>> group_count(torch.tensor([0, 1, 0]))
    tensor([2, 1, 2])
    """
    groups = _checked(group_ids, valid_rows)
    return _to_rows(_count(groups, valid_rows), groups)


def group_bounds(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None
) -> tuple[PerSequence, PerSequence]:
    """Smallest and largest value of each row's group, exact; 0 and 0 if no row of the group is valid.

    >>> group_bounds(torch.tensor([3.0, 1.0, 4.0]), torch.tensor([0, 1, 0]))
    (tensor([3., 1., 3.]), tensor([4., 1., 4.]))
    """
    groups = _checked(group_ids, valid_rows)
    low, high = _bounds(upcast(x).contiguous(), groups, valid_rows)
    return _to_rows(low, groups), _to_rows(high, groups)


class GroupMoments(NamedTuple):
    """Of each row's group, all float (B,): how many rows are valid, their bounds, mean and standard deviation.

    ``centred`` is the row's own value less the mean, both measured from the minimum: a large common offset takes no
    digits away, where beside 1e5 a float32 mean is rounded to 1/128, and equal values give exactly 0.
    """

    size: PerSequence
    low: PerSequence
    high: PerSequence
    mean_above_low: PerSequence
    centred: PerSequence
    std: PerSequence

    @property
    def mean(self) -> PerSequence:
        return self.low + self.mean_above_low


def group_moments(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, ddof: int = 1
) -> GroupMoments:
    """Everything that can be said of a group, asked once: the divisor of σ², two-pass, is n − ddof; 0 if not positive.

    >>> group_moments(torch.tensor([3.0, 5.0]), torch.tensor([0, 0])).std
    tensor([1.4142, 1.4142])
    """
    groups = _checked(group_ids, valid_rows)
    x = upcast(x).contiguous()
    size = _to_rows(_sum(_valid(torch.ones_like(x), valid_rows), groups), groups)
    low, high = (_to_rows(bound, groups) for bound in _bounds(x, groups, valid_rows))
    above = x - low
    mean_above_low = _to_rows(_sum(_valid(above, valid_rows), groups), groups) / size.clamp(min=1)
    centred = above - mean_above_low
    squares = _to_rows(_sum(_valid(centred, valid_rows).square(), groups), groups)
    std = (squares / threshold(size - ddof, 0.0, torch.inf)).sqrt()
    return GroupMoments(size, low, high, mean_above_low, centred, std)


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
    return is_narrow(*group_bounds(x, group_ids, valid_rows), tolerance=tolerance)


def is_varied(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, tolerance: float = 1e-6
) -> RowMask:
    """True where the row's group has max - min > tolerance * max(1, |max|, |min|).

    The opposite of :func:`is_constant`, but for a group with a NaN, which is neither.

    >>> is_varied(torch.tensor([0.1, 0.1, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])).tolist()
    [False, False, True, True]
    """
    low, high = group_bounds(x, group_ids, valid_rows)
    return high - low > _limit(low, high, tolerance)


def is_narrow(low: PerSequence, high: PerSequence, *, tolerance: float) -> RowMask:
    """:func:`is_constant` of bounds that are at hand.

    >>> is_narrow(torch.tensor([0.0, 5.0]), torch.tensor([1.0, 5.0]), tolerance=1e-6)
    tensor([False,  True])
    """
    return high - low <= _limit(low, high, tolerance)


def _limit(low: PerSequence, high: PerSequence, tolerance: float) -> PerSequence:
    return tolerance * torch.maximum(high, -low).clamp(min=1.0)


def group_mean(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None) -> PerSequence:
    """Mean of each row's group, measured from its minimum so that equal values give exactly that value.

    >>> group_mean(torch.tensor([3.0, 1.0, 4.0]), torch.tensor([0, 1, 0]))
    tensor([3.5000, 1.0000, 3.5000])
    """
    return group_moments(x, group_ids, valid_rows).mean


def group_centred(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None) -> PerSequence:
    """``x`` minus the mean of each row's group, both measured from the group's minimum: see :class:`GroupMoments`.

    >>> group_centred(torch.tensor([100001.0, 100002.0, 100004.0]), torch.zeros(3, dtype=torch.int64))
    tensor([-1.3333, -0.3333,  1.6667])
    """
    return group_moments(x, group_ids, valid_rows).centred


def group_std(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, ddof: int = 1) -> PerSequence:
    """Standard deviation of each row's group, two-pass, with divisor n - ddof; 0 if that is not positive.

    >>> group_std(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    return group_moments(x, group_ids, valid_rows, ddof=ddof).std


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
