"""Mean and variance of what is valid in a batch, in two passes, over one rank or many."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlprims.masking import zero_outside


class Moments(NamedTuple):
    """How many entries are valid; their mean; each less the mean, 0 elsewhere; their variance."""

    size: Tensor
    mean: Tensor
    centred: Tensor
    variance: Tensor


def moments(x: Tensor, mask: Tensor, *, ddof: int, all_reduce: Callable[[Tensor], Tensor] | None) -> Moments:
    """The moments of ``x`` where the bool ``mask`` of its shape is True; ``all_reduce`` sums over the ranks.

    >>> moments(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]), ddof=1, all_reduce=None)
    Moments(size=tensor(2.), mean=tensor(2.), centred=tensor([-1.,  1.,  0.]), variance=tensor(2.))
    """
    reduce = all_reduce or (lambda x: x)
    x = zero_outside(x, mask)
    n, total = reduce(torch.stack([mask.count_nonzero().to(x.dtype), x.sum()]))
    count = n.clamp(min=1)
    centred = zero_outside(x - total / count, mask)
    # The rounding of the mean is left in every difference, and divided by ~0 where all are equal: take it out as well.
    rest, squares = reduce(torch.stack([centred.sum(), centred.square().sum()]))
    variance = (squares - rest.square() / count).clamp(min=0.0) / (n - ddof).clamp(min=1)
    return Moments(n, (total + rest) / count, zero_outside(centred - rest / count, mask), variance)
