"""Sums, bounds and spreading over groups, in whichever layout is fastest; :mod:`rlprims.grouping` has the formulas.

A formula gets a :class:`Groups` and the numbers of the rows in its layout. What has one entry per id it may combine
with other such; ``rows`` gives each row its group's. Operators do the same to arrays and to tensors; the rest has a
method.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlprims.masking import upcast
from rlprims.types import GroupIds, RowMask

Numbers: TypeAlias = Any
"""A tensor or an array, per row or per id, as the layout has it."""


class Groups:
    """In torch: traced, on an accelerator, or with a gradient. There is room for as many ids as rows.

    ``valid`` is None if all rows count.
    """

    def __init__(self, ids: Numbers, valid: Numbers | None, entries: int) -> None:
        self.ids, self.valid, self.entries = ids, valid, entries

    def numbers(self, x: Tensor) -> Numbers:
        """(B,) in this layout."""
        return x

    def tensor(self, x: Numbers) -> Tensor:
        """And back."""
        answer: Tensor = x
        return answer

    def scalar(self, x: Tensor) -> Numbers:
        """A number that all groups share."""
        return x

    def rows(self, x: Numbers) -> Numbers:
        """Each row its group's."""
        return x.index_select(0, self.ids)

    def count(self) -> Numbers:
        """Valid rows per id, int64."""
        return self._sum(torch.ones_like(self.ids) if self.valid is None else self.valid.long())

    def size(self, x: Numbers) -> Numbers:
        """The same in the precision of ``x``."""
        return self.count().to(x.dtype)

    def where(self, condition: Numbers, x: Numbers, otherwise: Numbers) -> Numbers:
        return torch.where(condition, x, otherwise)

    def larger(self, x: Numbers, y: Numbers | float) -> Numbers:
        return x.clamp(min=y)

    def sum(self, x: Numbers) -> Numbers:
        """Over the valid rows, per id."""
        return self._sum(self._valid(x, 0.0))

    def low(self, x: Numbers) -> Numbers:
        """Smallest per id; 0 if no row is valid."""
        return self._or_zero(self._low(self._valid(x, np.inf)))

    def high(self, x: Numbers) -> Numbers:
        """Largest per id; 0 if no row is valid."""
        return self._or_zero(self._high(self._valid(x, -np.inf)))

    def some(self, x: Numbers) -> Numbers:
        """One of each id's numbers, of a valid row; 0 if there is none."""
        return self.low(x)

    def _sum(self, x: Numbers) -> Numbers:
        return x.new_zeros(self.entries).scatter_add_(0, self.ids, x)

    def _low(self, x: Numbers) -> Numbers:
        return x.new_full((self.entries,), torch.inf).scatter_reduce_(0, self.ids, x, "amin")

    def _high(self, x: Numbers) -> Numbers:
        return x.new_full((self.entries,), -torch.inf).scatter_reduce_(0, self.ids, x, "amax")

    def _or_zero(self, x: Numbers) -> Numbers:
        return x if self.valid is None else self.where(self.count() > 0, x, 0.0)

    def _valid(self, x: Numbers, otherwise: float) -> Numbers:
        return x if self.valid is None else self.where(self.valid, x, otherwise)


_FEW_ROWS = 2**11
"""Up to so many, to look for a better layout takes as long as it saves."""

_EXACT = 2**24
"""Up to so many, float32 counts without rounding."""


def on_groups(
    formula: Callable[..., tuple[Numbers, ...]], group_ids: GroupIds, valid_rows: RowMask | None, *x: Tensor
) -> tuple[Tensor, ...]:
    """What ``formula(groups, *numbers)`` says of each row; float32 or float64 as given, anything less is made float32.

    >>> on_groups(lambda g, x: (x - g.rows(g.sum(x)),), torch.tensor([0, 1, 0]), None, torch.tensor([1.0, 2.0, 3.0]))
    (tensor([-3.,  0., -1.]),)
    """
    largest = checked_largest(group_ids)
    if valid_rows is not None and (valid_rows.shape != group_ids.shape or valid_rows.dtype is not torch.bool):
        raise ValueError(
            f"valid_rows has shape {tuple(valid_rows.shape)} and dtype {valid_rows.dtype}, "
            f"needs bool ({len(group_ids)},): one answer per row"
        )
    numbers = [upcast(y) for y in x]
    if largest is None or (torch.is_grad_enabled() and any(y.requires_grad for y in numbers)):
        return formula(Groups(group_ids, valid_rows, len(group_ids)), *(y.contiguous() for y in numbers))
    ids, valid = group_ids.numpy(), None if valid_rows is None else valid_rows.numpy()
    columns = ids.size > _FEW_ROWS and _stand_together(ids, largest + 1)
    groups = (_OfColumns if columns else _OfArrays)(ids, valid, largest + 1)
    with np.errstate(all="ignore"):  # as torch does
        return tuple(map(groups.tensor, formula(groups, *map(groups.numbers, numbers))))


def checked_largest(group_ids: GroupIds) -> int | None:
    """The largest id, checked; None where it is not read."""
    if group_ids.dim() != 1 or group_ids.dtype is not torch.int64:
        raise ValueError(
            f"group_ids has shape {tuple(group_ids.shape)} and dtype {group_ids.dtype}, needs int64 (B,): "
            "use grouping.dense_ids(labels)"
        )
    # Reading values would stall an accelerator and break a traced graph; there index_add's own bounds check speaks.
    if group_ids.device.type != "cpu" or torch.compiler.is_compiling() or not group_ids.numel():
        return None
    ids = group_ids.numpy()
    largest = int(np.maximum.reduce(ids.view(np.uint64)))  # what is negative is large there
    if largest >= ids.size:
        raise ValueError(
            f"group_ids run from {ids.min()} to {ids.max()}, need 0 to at most {ids.size - 1}, the rows less one: "
            "use grouping.dense_ids(labels)"
        )
    return largest


def _stand_together(ids: NDArray[np.int64], groups: int) -> bool:
    """Whether 0, 1, ... follow each other, each in as many rows."""
    height, rest = divmod(len(ids), groups)
    if rest or ids[0] != 0 or ids[height - 1] != 0 or ids[-height] != groups - 1:  # so that most are seen at once
        return False
    return bool((ids.reshape(groups, height) == np.arange(groups)[:, None]).all())


class Moments(NamedTuple):
    """Per id: how many rows are valid, and their mean as an origin and the distance to it. Per row: how far it is from
    the mean.

    The origin is one of the group's numbers: a large common offset takes no digits away, where beside 1e5 a float32
    mean is rounded to 1/128, and equal values give exactly 0.
    """

    size: Numbers
    origin: Numbers
    mean_from_origin: Numbers
    centred: Numbers


def moments_of(groups: Groups, x: Numbers) -> Moments:
    size, origin = groups.size(x), groups.some(x)
    apart = x - groups.rows(origin)
    mean = groups.sum(apart) / groups.larger(size, 1.0)
    return Moments(size, origin, mean, apart - groups.rows(mean))


def squares_of(groups: Groups, moments: Moments) -> Numbers:
    """Per id, the sum of the squared distances to the mean."""
    return groups.sum(moments.centred * moments.centred)


def variance_of(groups: Groups, squares: Numbers, size: Numbers, ddof: int) -> Numbers:
    """Per id, with divisor n - ddof; 0 if that is not positive."""
    divisor = size - ddof
    # With ddof of at most 1, one row alone has a divisor that is not positive, and its sum of squares is 0.
    divisor = groups.larger(divisor, 1.0) if ddof <= 1 else groups.where(divisor > 0, divisor, np.inf)
    return squares / divisor


def constant(groups: Groups, x: Numbers, tolerance: float, squares: Numbers = None, size: Numbers = None) -> Numbers:
    """Per id, whether max - min <= tolerance * max(1, |max|, |min|); never with a NaN.

    Of n numbers the width is at least twice the root of their mean square, so that where the squares are known they
    nearly always say it, and two passes over the rows are saved.
    """
    if isinstance(squares, np.ndarray) and groups.valid is None and tolerance > 1e-9:
        widest = tolerance * max(1.0, float(np.maximum.reduce(np.abs(x), axis=None)))
        varied = squares > size * (widest * widest)
        if np.logical_and.reduce(varied | (squares == 0)):
            return np.logical_not(varied)
    width, limit = width_and_limit(groups, x, tolerance)
    return width <= limit


def width_and_limit(groups: Groups, x: Numbers, tolerance: float) -> tuple[Numbers, Numbers]:
    """Per id, max - min, and tolerance * max(1, |max|, |min|)."""
    low, high = groups.low(x), groups.high(x)
    return high - low, tolerance * groups.larger(groups.larger(high, -low), 1.0)


class _OfArrays(Groups):
    """In numpy, whose calls take a third of the time of torch's. There is room for the ids that occur."""

    def numbers(self, x: Tensor) -> NDArray[Any]:
        return x.detach().numpy()

    def tensor(self, x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(x)

    def scalar(self, x: Tensor) -> float:
        return float(x)

    def rows(self, x: NDArray[Any]) -> Numbers:
        return x.take(self.ids)

    def count(self) -> NDArray[np.int64]:
        return np.bincount(self.ids if self.valid is None else self.ids[self.valid], minlength=self.entries)

    def size(self, x: NDArray[Any]) -> NDArray[Any]:
        if self.valid is None and _FEW_ROWS < x.size <= _EXACT:
            return self._sum(np.ones(x.size, x.dtype))  # half the time of bincount
        return self.count().astype(x.dtype)

    def where(self, condition: NDArray[np.bool_], x: Numbers, otherwise: Numbers) -> Numbers:
        return np.where(condition, x, otherwise)

    def larger(self, x: NDArray[Any], y: NDArray[Any] | float) -> Numbers:
        return np.maximum(x, y)

    def some(self, x: NDArray[Any]) -> Numbers:
        some = np.zeros(self.entries, x.dtype)
        if self.valid is None:
            some[self.ids] = x
        else:
            some[self.ids[self.valid]] = x[self.valid]
        return some

    def _sum(self, x: NDArray[Any]) -> NDArray[Any]:
        total = np.zeros(self.entries, x.dtype)
        if x.size > _FEW_ROWS:
            torch.from_numpy(total).scatter_add_(0, torch.from_numpy(self.ids), torch.from_numpy(x))
        else:
            np.add.at(total, self.ids, x)
        return total

    def _low(self, x: NDArray[Any]) -> NDArray[Any]:
        low = np.full(self.entries, np.inf, x.dtype)
        np.minimum.at(low, self.ids, x)
        return low

    def _high(self, x: NDArray[Any]) -> NDArray[Any]:
        high = np.full(self.entries, -np.inf, x.dtype)
        np.maximum.at(high, self.ids, x)
        return high


class _OfColumns(_OfArrays):
    """In numpy, of groups that stand together and have as many rows each: they are the columns of a table."""

    def __init__(self, ids: NDArray[np.int64], valid: NDArray[np.bool_] | None, entries: int) -> None:
        self.entries, self.height = entries, ids.size // entries
        self.valid = None if valid is None else self._table(valid)

    def _table(self, x: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(x.reshape(self.entries, self.height).T)

    def numbers(self, x: Tensor) -> NDArray[Any]:
        return self._table(x.detach().numpy())

    def tensor(self, x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(x.repeat(self.height) if x.ndim == 1 else x.T.reshape(-1))

    def rows(self, x: NDArray[Any]) -> NDArray[Any]:
        return x

    def size(self, x: NDArray[Any]) -> NDArray[Any]:
        return self.count().astype(x.dtype)

    def count(self) -> NDArray[np.int64]:
        return np.full(self.entries, self.height) if self.valid is None else self.valid.sum(0)

    def some(self, x: NDArray[Any]) -> Numbers:
        return x[0] if self.valid is None else self._valid(x, 0.0)[self.valid.argmax(0), np.arange(self.entries)]

    def _sum(self, x: NDArray[Any]) -> Numbers:
        return np.add.reduce(x)

    def _low(self, x: NDArray[Any]) -> Numbers:
        return np.minimum.reduce(x)

    def _high(self, x: NDArray[Any]) -> Numbers:
        return np.maximum.reduce(x)
