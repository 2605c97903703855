"""See :func:`remax`."""

from rlprims.blocks import by_blocks, selected
from rlprims.masking import check_sequences, check_tokens, spread
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

    >>> import torch
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
    reward_to_go = sums_from_right(selected(rewards, mask), cu_seqlens)
    return selected(reward_to_go - spread(baseline_scores, mask, cu_seqlens), mask)
