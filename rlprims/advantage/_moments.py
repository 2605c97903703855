"""Mean and variance of what is valid in a batch, in two passes, over one rank or many."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rlprims.blocks import selected
from rlprims.masking import count, row_blocks, upcast


class Moments(NamedTuple):
    """How many entries are valid, their mean and variance, and what :meth:`centred` takes off, one after the other."""

    size: Tensor
    mean: Tensor
    variance: Tensor
    offsets: tuple[Tensor, Tensor]

    def centred(self, x: Tensor, mask: Tensor) -> Tensor:
        """Each valid entry less the mean, 0 elsewhere."""
        mean, rest = self.offsets
        return selected((upcast(x) - mean).sub_(rest), mask)


def moments(x: Tensor, mask: Tensor, *, ddof: int, all_reduce: Callable[[Tensor], Tensor] | None) -> Moments:
    """The moments of ``x`` where the bool ``mask`` of its shape is True; ``all_reduce`` sums over the ranks.

    >>> m = moments(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]), ddof=1, all_reduce=None)
    >>> m.mean, m.variance
    (tensor(2.), tensor(2.))
    """
    reduce = partial(_reduced, all_reduce)
    blocks = [(x[rows], mask[rows]) for rows in row_blocks(x)]
    sums = [selected(b, m).sum() for b, m in blocks]
    n, total = reduce(count(mask).to(sums[0].dtype), _sum(sums))
    divisor = n.clamp(min=1)
    mean = total / divisor
    # The rounding of the mean is left in every difference, and divided by ~0 where all are equal: take it out as well.
    centred = (selected(upcast(b) - mean, m) for b, m in blocks)
    parts = [(c.sum(), _sum_of_squares(c)) for c in centred]
    rest, squares = reduce(*map(_sum, zip(*parts, strict=True)))
    variance = (squares - rest.square() / divisor).clamp(min=0.0) / (n - ddof).clamp(min=1)
    return Moments(n, (total + rest) / divisor, variance, (mean, rest / divisor))


def _reduced(all_reduce: Callable[[Tensor], Tensor] | None, *parts: Tensor) -> Sequence[Tensor]:
    return parts if all_reduce is None else all_reduce(torch.stack(parts)).unbind()


def _sum_of_squares(x: Tensor) -> Tensor:
    """``x`` is lost."""
    return (x.square() if x.requires_grad else x.square_()).sum()


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum() if len(parts) > 1 else parts[0]
