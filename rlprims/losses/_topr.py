"""See :func:`topr`."""

from typing import Literal

import torch

from rlprims.losses._with_slope import minus_weighted
from rlprims.masking import check_tokens, zero_outside
from rlprims.ratios import log_ratio, sequence_log_ratio
from rlprims.types import CuSeqlens, PerToken, TokenMask


def topr(
    log_probs: PerToken,
    rollout_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    level: Literal["sequence", "token"] = "sequence",
    w_max: float = 1.0,
) -> PerToken:
    """Tapered off-policy REINFORCE, Le Roux et al. 2025 (arXiv:2503.14286): only bad responses are weighted.

    With ρ = exp(Σ_t log_probs − rollout_log_probs) of the response and w = clip(ρ, 0, w_max), a constant:
    loss = −A log_probs where A > 0, −w A log_probs elsewhere. Good responses are imitated however unlikely they have
    become; bad ones cease to be pushed down as they vanish, which keeps the loss from running away without a KL term.

    The paper splits by the sign of the reward of a response. Here it is the advantage's, so pass advantages that keep
    it; ROLL splits by the raw score and has a ratio per token, which is ``level="token"``.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        rollout_log_probs: float, like log_probs: the policy that sampled, however old.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed.
        level: "sequence", the product of the response's ratios; or "token", each token's own.
        w_max: largest weight of a bad token, at least 1.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; an unknown level; w_max < 1.

    >>> m = torch.ones(2, 1, dtype=torch.bool)
    >>> now, then = torch.tensor([[-2.0], [-2.0]]), torch.tensor([[-1.0], [-1.0]])
    >>> topr(now, then, torch.tensor([[1.0], [-1.0]]), m)
    tensor([[ 2.0000],
            [-0.7358]])
    """
    check_tokens(
        response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages
    )
    if w_max < 1:
        raise ValueError(f"w_max={w_max} must be at least 1, the weight on policy")
    fixed = log_probs.detach()
    if level == "sequence":
        log_rho = sequence_log_ratio(fixed, rollout_log_probs, response_mask, cu_seqlens, mean=False)
    elif level == "token":
        log_rho = log_ratio(fixed, rollout_log_probs, response_mask)
    else:
        raise ValueError(f"unknown level {level!r}: choose 'sequence' or 'token'")
    a = zero_outside(advantages, response_mask).detach()
    weights = torch.where(a > 0, 1.0, log_rho.exp().clamp(max=w_max))
    return minus_weighted(log_probs, weights * a, response_mask)
