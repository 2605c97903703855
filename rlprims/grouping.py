"""Groups of samples that answer the same prompt: ids from any labels, and statistics of a group for each of its rows.

``group_ids`` are int64 (B,) and dense: every id is below B, so that no buffer depends on their values and no device is
asked to synchronize. :func:`dense_ids` makes them from any labels. Statistics come back as (B,), each row its group's.
``valid_rows`` (bool (B,)) leaves rows out of the statistics; they still receive their group's.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import count

import numpy as np
import torch
from torch import Tensor

from rlprims.masking import upcast
from rlprims.types import GroupIds, PerSequence, RowMask


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
    rows = np.arange(len(labels))
    first = np.empty(size, np.int64)
    first[labels[::-1]] = rows[::-1]  # of equal labels the last write stays: the first row
    first_of_group = first[labels]
    return torch.from_numpy((np.cumsum(first_of_group == rows) - 1)[first_of_group])


def check_group_ids(group_ids: GroupIds) -> None:
    """Raise ``ValueError`` unless the ids are int64 (B,) and below B."""
    if group_ids.dim() != 1 or group_ids.dtype is not torch.int64:
        raise ValueError(
            f"group_ids has shape {tuple(group_ids.shape)} and dtype {group_ids.dtype}, needs int64 (B,): "
            "use grouping.dense_ids(labels)"
        )
    # Reading values would stall an accelerator and break a traced graph; there index_add's own bounds check speaks.
    if group_ids.device.type == "cpu" and len(group_ids) and not torch.compiler.is_compiling():
        low, high = int(group_ids.min()), int(group_ids.max())
        if low < 0 or high >= len(group_ids):
            raise ValueError(
                f"group_ids run from {low} to {high}, need 0 to at most {len(group_ids) - 1}, the rows less one: "
                "use grouping.dense_ids(labels)"
            )


def _valid(group_ids: GroupIds, valid_rows: RowMask | None) -> RowMask:
    check_group_ids(group_ids)
    if valid_rows is None:
        return torch.ones_like(group_ids, dtype=torch.bool)
    if valid_rows.shape != group_ids.shape or valid_rows.dtype is not torch.bool:
        raise ValueError(
            f"valid_rows has shape {tuple(valid_rows.shape)} and dtype {valid_rows.dtype}, "
            f"needs bool ({len(group_ids)},): one answer per row"
        )
    return valid_rows


def _sum(x: Tensor, group_ids: GroupIds) -> Tensor:
    return torch.zeros_like(x).index_add(0, group_ids, x)[group_ids]


def group_count(group_ids: GroupIds, valid_rows: RowMask | None = None) -> Tensor:
    """How many (valid) rows each row's group has: int64 (B,).

    >>> group_count(torch.tensor([0, 1, 0]))
    tensor([2, 1, 2])
    """
    return _sum(_valid(group_ids, valid_rows).long(), group_ids)


def group_bounds(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None
) -> tuple[PerSequence, PerSequence]:
    """Smallest and largest value of each row's group, exact; 0 and 0 if no row of the group is valid.

    >>> group_bounds(torch.tensor([3.0, 1.0, 4.0]), torch.tensor([0, 1, 0]))
    (tensor([3., 1., 3.]), tensor([4., 1., 4.]))
    """
    valid = _valid(group_ids, valid_rows)
    x = upcast(x)
    infinity = torch.full_like(x, torch.inf)
    low = infinity.scatter_reduce(0, group_ids, torch.where(valid, x, torch.inf), "amin")[group_ids]
    high = (-infinity).scatter_reduce(0, group_ids, torch.where(valid, x, -torch.inf), "amax")[group_ids]
    some = group_count(group_ids, valid) > 0
    return torch.where(some, low, 0.0), torch.where(some, high, 0.0)


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
    spread, limit = _spread_and_limit(x, group_ids, valid_rows, tolerance)
    return spread <= limit


def is_varied(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, tolerance: float = 1e-6
) -> RowMask:
    """True where the row's group has max - min > tolerance * max(1, |max|, |min|).

    The opposite of :func:`is_constant`, but for a group with a NaN, which is neither.

    >>> is_varied(torch.tensor([0.1, 0.1, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])).tolist()
    [False, False, True, True]
    """
    spread, limit = _spread_and_limit(x, group_ids, valid_rows, tolerance)
    return spread > limit


def _spread_and_limit(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None, tolerance: float
) -> tuple[PerSequence, PerSequence]:
    low, high = group_bounds(x, group_ids, valid_rows)
    return high - low, tolerance * torch.maximum(high.abs(), low.abs()).clamp(min=1.0)


def group_mean(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None) -> PerSequence:
    """Mean of each row's group, measured from its minimum so that equal values give exactly that value.

    >>> group_mean(torch.tensor([3.0, 1.0, 4.0]), torch.tensor([0, 1, 0]))
    tensor([3.5000, 1.0000, 3.5000])
    """
    low, _, mean_above = _above_minimum(x, group_ids, valid_rows)
    return low + mean_above


def group_centred(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None) -> PerSequence:
    """``x`` minus the mean of each row's group, both measured from the group's minimum.

    The same as ``x - group_mean(x)``, but a large common offset takes no digits away: beside 1e5 a float32 mean is
    rounded to 1/128.

    >>> group_centred(torch.tensor([100001.0, 100002.0, 100004.0]), torch.zeros(3, dtype=torch.int64))
    tensor([-1.3333, -0.3333,  1.6667])
    """
    _, above, mean_above = _above_minimum(x, group_ids, valid_rows)
    return above - mean_above


def _above_minimum(
    x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None
) -> tuple[PerSequence, PerSequence, PerSequence]:
    """The group's minimum, each row above it, and the group's mean of that."""
    valid = _valid(group_ids, valid_rows)
    low, _ = group_bounds(x, group_ids, valid)
    above = upcast(x) - low
    count = group_count(group_ids, valid).clamp(min=1)
    return low, above, _sum(torch.where(valid, above, 0.0), group_ids) / count


def group_std(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, ddof: int = 1) -> PerSequence:
    """Standard deviation of each row's group, two-pass, with divisor n - ddof; 0 if that is not positive.

    >>> group_std(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    valid = _valid(group_ids, valid_rows)
    centred = torch.where(valid, group_centred(x, group_ids, valid), 0.0)
    divisor = group_count(group_ids, valid) - ddof
    return (_sum(centred.square(), group_ids) / divisor.clamp(min=1)).sqrt() * (divisor > 0)
