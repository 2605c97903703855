"""See :func:`batch_normalized`."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rlprims.corrections._weights import Weights
from rlprims.layout import sequence_lengths, sequence_sum
from rlprims.masking import check_tokens, zero_outside
from rlprims.types import CuSeqlens, TokenMask


def batch_normalized(
    weights: Weights,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    per: Literal["token", "sequence"] = "token",
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> Weights:
    """Weights over their mean, so that a correction does not change the size of the step: w / mean(w).

    The mean is over all valid tokens, or over the responses that have some, of each its tokens' mean: the first for
    weights of tokens, the second for weights of responses. Rejected tokens count, with weight 0. It is the mean of the
    whole step: call this once, before the batch is split. verl's ``rollout_is_batch_normalize``; ROLL and slime take
    the mean of a micro-batch.

    Args:
        weights: what :func:`importance_weights` and its like return, or a product of them.
        response_mask: bool (B, T) or (N,), like weights.values.
        cu_seqlens: int (B+1,) if packed.
        per: "token" or "sequence": what the mean is over.
        all_reduce: sums a tensor over the ranks that share the batch; None: this tensor is the batch.

    Returns:
        Weights of mean 1, which account for the same gaps; all 0 if they were.

    Raises:
        ValueError: shapes or dtypes that do not fit; an unknown option.

    >>> batch_normalized(Weights(torch.tensor([[2.0, 1.0]])), torch.ones(1, 2, dtype=torch.bool)).values
    tensor([[1.3333, 0.6667]])
    """
    check_tokens(response_mask, cu_seqlens, importance_weights=weights.values)
    values = zero_outside(weights.values, response_mask)
    lengths = sequence_lengths(response_mask, cu_seqlens)
    sums = sequence_sum(values, response_mask, cu_seqlens)
    if per == "token":
        parts = torch.stack([sums.sum(), lengths.sum().to(sums.dtype)])
    elif per == "sequence":
        parts = torch.stack([(sums / lengths.clamp(min=1)).sum(), (lengths > 0).sum().to(sums.dtype)])
    else:
        raise ValueError(f"unknown per {per!r}: choose 'token' or 'sequence'")
    total, count = parts if all_reduce is None else all_reduce(parts)
    mean = torch.where(total == 0, 1.0, total / count.clamp(min=1))
    return Weights(values / mean, weights.corrected)
