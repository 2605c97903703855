"""Groups of samples that answer the same prompt: ids from any labels, and statistics of the group of each row.

``group_ids`` are int64 (B,) and dense: every id is below B, so that the number of groups need not be read from a
device. :func:`dense_ids` makes them from any labels. A statistic is (B,): each row has the value of its group.
``valid_rows`` (bool (B,)) excludes rows from the statistics; they still get the value of their group.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import count
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlprims.kernels import are_readable
from rlprims.masking import check_at_least, check_tensors, upcast, zero_outside
from rlprims.types import CuSeqlens, GroupIds, PerSequence, RowMask


def dense_ids(labels: Iterable[Hashable] | np.ndarray | Tensor) -> GroupIds:
    """Dense int64 ids in order of first appearance, from any hashable labels.

    Labels are compared, never computed with: "1", "001", 1.25, 1.75 and -1 are five groups.

    Raises:
        ValueError: a label is NaN (it would equal nothing) or cannot be hashed.

    >>> dense_ids(["b", "a", "b", -1])
    tensor([0, 1, 0, 2])
    """
    ids: defaultdict[Hashable, int] = defaultdict(count().__next__)
    try:
        names = labels.tolist() if isinstance(labels, (Tensor, np.ndarray)) else list(labels)
        dense = np.fromiter(map(ids.__getitem__, names), np.int64, len(names))
    except TypeError as error:
        raise ValueError(f"expected hashable labels, one per row (strings, numbers, tuples): {error}") from None
    if any(isinstance(name, float) and math.isnan(name) for name in ids):
        raise ValueError("labels contain NaN, which equals no label: give those rows a label or drop them")
    return torch.from_numpy(dense)


def rows_by_label(labels: Iterable[Hashable]) -> list[list[int]]:
    """The rows of each label, ascending; labels in the order of their first rows.

    >>> rows_by_label(["b", "a", "b"])
    [[0, 2], [1]]
    """
    rows: defaultdict[Hashable, list[int]] = defaultdict(list)
    for row, label in enumerate(labels):
        rows[label].append(row)
    return list(rows.values())


def check_group_ids(group_ids: GroupIds, valid_rows: RowMask | None = None, *, name: str = "group_ids") -> None:
    """Raise ``ValueError`` unless the ids are int64 (B,) in [0, B), and ``valid_rows`` is bool (B,) or None.

    Values are read on a CPU only; on an accelerator ``index_add`` checks its bounds itself.
    """
    check_tensors(**{name: group_ids})
    if group_ids.dim() != 1 or group_ids.dtype is not torch.int64:
        raise ValueError(
            f"{name} has shape {tuple(group_ids.shape)} and dtype {group_ids.dtype}, expected int64 (B,): "
            "use grouping.dense_ids(labels)"
        )
    if valid_rows is not None and (valid_rows.shape != group_ids.shape or valid_rows.dtype is not torch.bool):
        raise ValueError(
            f"valid_rows has shape {tuple(valid_rows.shape)} and dtype {valid_rows.dtype}, "
            f"expected bool ({group_ids.shape[0]},): one entry per row"
        )
    if are_readable(group_ids) and group_ids.shape[0]:
        low, high = group_ids.aminmax()
        if low < 0 or high >= group_ids.shape[0]:
            raise ValueError(
                f"{name} run from {int(low)} to {int(high)}, expected ids in [0, {group_ids.shape[0]}), the number "
                "of rows: use grouping.dense_ids(labels) on each batch, and again where rows were dropped"
            )


def check_rows(group_ids: GroupIds, **per_row: Tensor) -> None:
    """Raise ``ValueError`` unless the ids are those of :func:`check_group_ids`, and every named tensor is (B,) too."""
    check_tensors(group_ids=group_ids, **per_row)
    for name, x in per_row.items():
        if x.shape != group_ids.shape:
            shapes = f"{name} has shape {tuple(x.shape)}, group_ids has {tuple(group_ids.shape)}"
            raise ValueError(f"{shapes}: expected (B,) for both")
    check_group_ids(group_ids)


def group_count(group_ids: GroupIds, valid_rows: RowMask | None = None) -> Tensor:
    """Number of (valid) rows of each row's group: int64 (B,).

    >>> group_count(torch.tensor([0, 1, 0]))
    tensor([2, 1, 2])
    """
    check_group_ids(group_ids, valid_rows)
    ones = torch.ones_like(group_ids) if valid_rows is None else valid_rows.long()
    return _sum_by_group(ones, group_ids)


def first_rows(group_ids: GroupIds, valid_rows: RowMask | None = None) -> Tensor:
    """The first (valid) row of group 0, 1, ...: int64 (B,), and B for an id that no row has.

    >>> first_rows(torch.tensor([1, 0, 1]))
    tensor([1, 0, 3])
    """
    check_group_ids(group_ids, valid_rows)
    row = torch.arange(group_ids.shape[0], device=group_ids.device)
    none = torch.full_like(row, group_ids.shape[0])
    candidates = row if valid_rows is None else torch.where(valid_rows, row, none)
    return none.scatter_reduce(0, group_ids, candidates, "amin")


def group_sum(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None) -> PerSequence:
    """Sum of each row's group.

    >>> group_sum(torch.tensor([3.0, 1.0, 4.0]), torch.tensor([0, 1, 0]))
    tensor([7., 1., 7.])
    """
    check_group_ids(group_ids, valid_rows)
    return _sum_by_group(_valid(x, valid_rows), group_ids)


def group_bounds(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None
) -> tuple[PerSequence, PerSequence]:
    """Smallest and largest value of each row's group, exact; 0 and 0 if no row of the group is valid.

    >>> group_bounds(torch.tensor([3.0, 1.0, 4.0]), torch.tensor([0, 1, 0]))
    (tensor([3., 1., 3.]), tensor([4., 1., 4.]))
    """
    check_group_ids(group_ids, valid_rows)
    x = upcast(x)
    low, high = _extreme_by_group(x, group_ids, valid_rows, "amin"), _extreme_by_group(x, group_ids, valid_rows, "amax")
    if valid_rows is None:
        return low, high
    some_valid = group_count(group_ids, valid_rows) > 0
    return zero_outside(low, some_valid), zero_outside(high, some_valid)


def is_constant(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, tolerance: float = 1e-6
) -> RowMask:
    """True where the row's group has max - min <= tolerance * max(1, |max|, |min|); never for a group with a NaN.

    The test uses the range because the computed std of seven equal 0.1 is 1.4e-17 and not 0.

    >>> is_constant(torch.tensor([0.1] * 7 + [0.0, 1.0]), torch.tensor([0] * 7 + [1] * 2)).tolist()
    [True, True, True, True, True, True, True, False, False]
    """
    check_at_least(0, tolerance=tolerance)
    low, high = group_bounds(x.detach(), group_ids, valid_rows)
    return high - low <= tolerance * torch.maximum(high, -low).clamp(min=1)


def is_varied(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, tolerance: float = 1e-6
) -> RowMask:
    """True where the row's group has max - min > tolerance * max(1, |max|, |min|).

    The opposite of :func:`is_constant`, except that a group with a NaN is neither.

    >>> is_varied(torch.tensor([0.1, 0.1, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])).tolist()
    [False, False, True, True]
    """
    check_at_least(0, tolerance=tolerance)
    low, high = group_bounds(x.detach(), group_ids, valid_rows)
    return high - low > tolerance * torch.maximum(high, -low).clamp(min=1)


def group_mean(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None) -> PerSequence:
    """Mean of each row's group; a group of equal values gives exactly that value.

    >>> group_mean(torch.tensor([3.0, 1.0, 4.0]), torch.tensor([0, 1, 0]))
    tensor([3.5000, 1.0000, 3.5000])
    """
    return _mean(x, group_ids, valid_rows).to(upcast(x).dtype)


def group_mean_of_others(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None) -> PerSequence:
    """Mean of the other rows of each row's group, (n μ − x) / (n − 1); in a group of one the row's own value.

    >>> group_mean_of_others(torch.tensor([3.0, 1.0, 4.0, 5.0]), torch.tensor([0, 1, 0, 0]))
    tensor([4.5000, 1.0000, 4.0000, 3.5000])
    """
    others = (group_count(group_ids, valid_rows) - 1).clamp(min=1)
    own = _valid(group_centred(x, group_ids, valid_rows), valid_rows)
    return group_mean(x, group_ids, valid_rows) - own / others


def group_centred(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None) -> PerSequence:
    """``x`` minus the mean of each row's group.

    The mean is float64, so that a large common offset costs no digits: near 1e5 a float32 mean is rounded to 1/128.

    >>> group_centred(torch.tensor([100001.0, 100002.0, 100004.0]), torch.zeros(3, dtype=torch.int64))
    tensor([-1.3333, -0.3333,  1.6667])
    """
    return (x.double() - _mean(x, group_ids, valid_rows)).to(upcast(x).dtype)


def variance_of_centred(
    centred: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, ddof: int = 1
) -> PerSequence:
    """Variance of each row's group of values that are already centred: Σ centred² / (n − ddof).

    >>> variance_of_centred(torch.tensor([0.75, -0.25, -0.25, -0.25]), torch.zeros(4, dtype=torch.int64))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    divisor = group_count(group_ids, valid_rows) - ddof
    squares = group_sum(centred.square(), group_ids, valid_rows)
    return zero_outside(squares / divisor.clamp(min=1), divisor > 0)


def group_std(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, ddof: int = 1) -> PerSequence:
    """Standard deviation of each row's group, with divisor n - ddof; 0, with gradient 0, if it is 0 or not defined.

    >>> group_std(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    return safe_sqrt(_variance(x, group_ids, valid_rows, ddof)).to(upcast(x).dtype)


def safe_sqrt(x: Tensor) -> Tensor:
    """The square root, with gradient 0 at 0 instead of infinity.

    >>> x = torch.tensor([0.0, 4.0], requires_grad=True)
    >>> torch.autograd.grad(safe_sqrt(x).sum(), x)
    (tensor([0.0000, 0.2500]),)
    """
    return torch.where(x == 0, 0.0, torch.where(x == 0, 1.0, x).sqrt())


def _mean(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None) -> Tensor:
    """The mean of each row's group, in float64; of equal values exactly that value."""
    count = group_count(group_ids, valid_rows).clamp(min=1)
    mean = group_sum(x.double(), group_ids, valid_rows) / count
    if x.dtype is not torch.float64:
        return mean
    return mean + group_sum(x - mean, group_ids, valid_rows) / count  # corrects the rounding of the sum


def _variance(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None, ddof: int) -> Tensor:
    """The variance in float64, where the square of any float32 is finite."""
    centred = group_centred(x, group_ids, valid_rows).double()
    return variance_of_centred(centred, group_ids, valid_rows, ddof=ddof)


def _valid(x: PerSequence, valid_rows: RowMask | None) -> PerSequence:
    return upcast(x) if valid_rows is None else zero_outside(x, valid_rows)


def _sum_by_group(x: Tensor, group_ids: GroupIds) -> Tensor:
    """The sum of each row's group. Floats are added in float64, because index_add adds one row at a time."""
    terms = x.double() if x.is_floating_point() else x
    return torch.zeros_like(terms).index_add(0, group_ids, terms)[group_ids].to(x.dtype)


def _extreme_by_group(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None, reduce: Literal["amin", "amax"]
) -> PerSequence:
    neutral = torch.inf if reduce == "amin" else -torch.inf
    if valid_rows is not None:
        x = torch.where(valid_rows, x, neutral)
    return torch.full_like(x, neutral).scatter_reduce(0, group_ids, x, reduce)[group_ids]


class SortedGroups(NamedTuple):
    """The rows of each group, sorted by value.

    ``order`` lists the rows, group after group, with ascending values inside a group. Group g is ``cu[g]:cu[g+1]``.
    ``sizes`` (B,) has the number of valid rows of the group, ``ranks`` (B,) the rank from 0; both are in that order.
    """

    order: Tensor
    cu: CuSeqlens
    sizes: Tensor
    ranks: Tensor

    def sort(self, x: PerSequence) -> PerSequence:
        return x[self.order]

    def unsort(self, x: PerSequence) -> PerSequence:
        return torch.zeros_like(x).index_put((self.order,), x)


def group_ranks(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None) -> SortedGroups:
    """Sort the rows of each group by value. Equal values keep the order of their rows.

    Invalid rows come last in their group, and the sizes do not count them.

    >>> group_ranks(torch.tensor([3.0, 9.0, 1.0]), torch.tensor([0, 1, 0]))
    SortedGroups(order=tensor([2, 0, 1]), cu=tensor([0, 2, 3, 3]), sizes=tensor([2, 2, 1]), ranks=tensor([0, 1, 0]))
    """
    order = x.argsort(stable=True)
    if valid_rows is not None:
        order = order[(~valid_rows[order]).long().argsort(stable=True)]
    order = order[group_ids[order].argsort(stable=True)]
    counts = torch.zeros_like(group_ids).index_add(0, group_ids, torch.ones_like(group_ids))
    cu = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    ranks = torch.arange(x.shape[0], device=x.device) - cu[group_ids[order]]
    return SortedGroups(order, cu, group_count(group_ids, valid_rows)[order], ranks)
