"""Mean and variance over a whole batch, which may be split over ranks."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlprims.masking import zero_outside


class BatchMoments(NamedTuple):
    """Mean and variance of the valid entries of a batch, and each valid entry minus the mean (0 elsewhere)."""

    mean: Tensor
    variance: Tensor
    centred: Tensor


def batch_moments(x: Tensor, mask: Tensor, *, ddof: int, all_reduce: Callable[[Tensor], Tensor] | None) -> BatchMoments:
    """The moments of ``x`` where the mask is True, in two passes; the variance has divisor n − ddof.

    ``all_reduce`` sums a tensor over the ranks, if the batch is split over ranks; None: it is whole.

    >>> batch_moments(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]), ddof=1, all_reduce=None)
    BatchMoments(mean=tensor(2.), variance=tensor(2.), centred=tensor([-1.,  1.,  0.]))
    """
    x = zero_outside(x, mask)
    size, total = _over_ranks(all_reduce, mask.sum().to(x.dtype), x.sum())
    n = size.clamp(min=1)
    mean = total / n
    centred = zero_outside(x - mean, mask)
    # The mean is rounded, so every difference has its error. If all entries are equal, that error would be divided by a
    # σ near 0. Therefore the mean of the differences is subtracted too.
    residual, squares = _over_ranks(all_reduce, centred.sum(), centred.square().sum())
    variance = (squares - residual.square() / n).clamp(min=0) / (size - ddof).clamp(min=1)
    return BatchMoments(mean, variance, zero_outside(centred - residual / n, mask))


def _over_ranks(all_reduce: Callable[[Tensor], Tensor] | None, *sums: Tensor) -> tuple[Tensor, ...]:
    return sums if all_reduce is None else all_reduce(torch.stack(sums)).unbind()
