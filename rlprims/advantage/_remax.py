"""See :func:`remax`."""

import torch

from rlprims.blocks import by_blocks
from rlprims.layout import expand_to_tokens
from rlprims.masking import check_sequences, check_tokens, write_zero_outside, zero_outside
from rlprims.recurrence import sums_from_right
from rlprims.types import CuSeqlens, PerSequence, PerToken, TokenMask


def remax(
    rewards: PerToken,
    baseline_scores: PerSequence,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
) -> PerToken:
    """ReMax, Li et al. 2023 (arXiv:2310.10505), algorithm 1: the greedy response's score is the baseline.

    A_t = Σ_{u≥t} r_u − b, where b is the score of the greedy response to the same prompt, scored by the same function.
    Any other number that does not depend on the response will do, and leaves the gradient unbiased: see
    :func:`optimal_value`, :class:`RoleBaseline`, :class:`ValueTracker`.

    Args:
        rewards: float (B, T) or (N,), per token.
        baseline_scores: float (B,), the greedy response's score, or another baseline.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.

    Returns:
        float, like rewards; 0 outside the mask (verl leaves the return − 0 on tool tokens).

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> m = torch.tensor([[True, True, False]])
    >>> remax(torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([0.25]), m)
    tensor([[0.7500, 0.7500, 0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, rewards=rewards)
    check_sequences(response_mask, cu_seqlens, baseline_scores=baseline_scores)
    return by_blocks(_in_block, (rewards, response_mask), cu_seqlens, baseline_scores)


def _in_block(
    rewards: PerToken, mask: TokenMask, cu_seqlens: CuSeqlens | None, baseline_scores: PerSequence
) -> PerToken:
    a = sums_from_right(zero_outside(rewards, mask), cu_seqlens)
    baseline = expand_to_tokens(baseline_scores, mask, cu_seqlens)
    if a.requires_grad or baseline.requires_grad or not a.dtype == baseline.dtype == torch.float32:
        return zero_outside(a - baseline, mask)
    write_zero_outside(mask, (a.sub_(baseline), a))
    return a
