"""What estimators begin with: the responses that count, one score for each of them, and the moments of the batch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlprims.grouping import check_group_ids
from rlprims.layout import expand_to_tokens, sequence_sum
from rlprims.masking import check_sequences, check_tokens, zero_outside
from rlprims.types import CuSeqlens, GroupIds, PerSequence, PerToken, RowMask, TokenMask


def response_scores(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None,
    valid_rows: RowMask | None,
) -> tuple[PerSequence, TokenMask]:
    """s_i = Σ_t r_it, 0 for rows that are not valid, and the mask of the tokens of valid rows.

    >>> rewards, mask = torch.tensor([[1.0, 2.0], [torch.nan, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> response_scores(rewards, torch.tensor([0, 0]), mask, None, torch.tensor([True, False]))
    (tensor([3., 0.]), tensor([[ True,  True],
            [False, False]]))
    """
    check_tokens(response_mask, cu_seqlens, rewards=rewards)
    mask = tokens_of_valid_rows(response_mask, group_ids, cu_seqlens, valid_rows)
    return sequence_sum(rewards, mask, cu_seqlens), mask


def tokens_of_valid_rows(
    response_mask: TokenMask, group_ids: GroupIds, cu_seqlens: CuSeqlens | None, valid_rows: RowMask | None
) -> TokenMask:
    """The mask, False on rows that are not valid; raises ``ValueError`` if ids or valid rows do not fit the mask.

    >>> mask, cu_seqlens = torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 3])
    >>> tokens_of_valid_rows(mask, torch.tensor([0, 0]), cu_seqlens, torch.tensor([True, False]))
    tensor([ True, False, False])
    """
    check_sequences(response_mask, cu_seqlens, group_ids=group_ids)
    check_group_ids(group_ids, valid_rows)
    return (
        response_mask if valid_rows is None else response_mask & expand_to_tokens(valid_rows, response_mask, cu_seqlens)
    )


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
