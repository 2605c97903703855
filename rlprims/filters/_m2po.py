"""See :func:`m2po`."""

import torch

from rlprims.masking import check_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask


def m2po(
    log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    tau: float = 0.04,
) -> TokenMask:
    """Drop the tokens farthest off policy until the rest is near: M2PO, Zheng et al. 2025 (arXiv:2510.01161).

    With d = log_probs − rollout_log_probs, the most tokens of smallest d² are kept whose mean of d² is at most τ. The
    second moment, unlike a mean of d, has no signs that cancel, so a few extreme tokens are dropped and the others are
    left unclipped, however stale.

    The moment is the whole step's: call this once, before the batch is split. AReaL takes a micro-batch's, and always
    leaves one token. Tokens that tie are kept or dropped together.

    Args:
        log_probs: float (B, T) or (N,), the policy before the update; a constant here.
        rollout_log_probs: float, like log_probs: the policy that sampled.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; the moment does not need it.
        tau: τ, the largest mean of d², in nats²; at least 0.

    Returns:
        bool, like log_probs: True where kept; False outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; a negative tau.

    >>> m = torch.ones(1, 4, dtype=torch.bool)
    >>> m2po(torch.tensor([[0.0, -0.5, 0.1, 0.2]]), torch.zeros(1, 4), m).tolist()
    [[True, False, True, True]]
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs)
    if tau < 0:
        raise ValueError(f"tau={tau} must be at least 0, in nats²")
    difference = zero_outside(log_probs.detach(), response_mask) - zero_outside(rollout_log_probs, response_mask)
    moment = difference.square()
    order = torch.where(response_mask, moment, torch.inf).flatten().sort().values
    # The mean of the smallest k grows with k, so how many means are small enough is also the largest such k.
    means = order.cumsum(0) / torch.arange(1, len(order) + 1, device=order.device)
    kept = (means <= tau).sum().reshape(1)
    first_dropped = torch.cat([order, order.new_full((1,), torch.inf)]).gather(0, kept)
    return response_mask & (moment < first_dropped)
