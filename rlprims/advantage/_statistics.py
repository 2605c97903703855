"""Mean and variance of a whole batch, over ranks too."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlprims.masking import zero_outside


class BatchMoments(NamedTuple):
    """Of the valid entries of a batch: mean and variance, and each entry minus the mean, 0 elsewhere."""

    mean: Tensor
    variance: Tensor
    centred: Tensor


def batch_moments(x: Tensor, mask: Tensor, *, ddof: int, all_reduce: Callable[[Tensor], Tensor] | None) -> BatchMoments:
    """The moments of ``x`` where the mask is True, in two passes; the variance has divisor n − ddof.

    ``all_reduce`` sums a tensor over the ranks that share the batch; None: this tensor is the whole batch.

    >>> batch_moments(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]), ddof=1, all_reduce=None)
    BatchMoments(mean=tensor(2.), variance=tensor(2.), centred=tensor([-1.,  1.,  0.]))
    """
    x = zero_outside(x, mask)
    size, total = _over_ranks(all_reduce, mask.sum().to(x.dtype), x.sum())
    n = size.clamp(min=1)
    mean = total / n
    centred = zero_outside(x - mean, mask)
    # The mean is rounded. Its error is in every difference, and would be divided by a σ of about 0 if all entries are
    # equal: so the mean of the differences is subtracted too.
    residual, squares = _over_ranks(all_reduce, centred.sum(), centred.square().sum())
    variance = (squares - residual.square() / n).clamp(min=0) / (size - ddof).clamp(min=1)
    return BatchMoments(mean, variance, zero_outside(centred - residual / n, mask))


def _over_ranks(all_reduce: Callable[[Tensor], Tensor] | None, *sums: Tensor) -> tuple[Tensor, ...]:
    return sums if all_reduce is None else all_reduce(torch.stack(sums)).unbind()
