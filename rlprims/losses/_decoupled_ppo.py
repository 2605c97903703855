"""See :func:`decoupled_ppo`."""

import math
from functools import partial

from torch import Tensor

from rlprims.losses._bounds import check_ratio_bounds
from rlprims.losses._clipped_surrogate import clipped
from rlprims.losses._with_slope import limited_log_ratio, with_slope
from rlprims.masking import check_tokens
from rlprims.types import CuSeqlens, PerToken, TokenMask


def decoupled_ppo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    w_max: float | None = None,
) -> PerToken:
    """Decoupled PPO, Hilton et al. 2021 (arXiv:2110.00641): the policy to stay near is not the one that sampled.

    With ρ = exp(log_probs − old_log_probs) to the proximal policy, and w = exp(old_log_probs − rollout_log_probs) from
    the behaviour policy, a constant: loss = −w min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A). So stale responses
    are corrected for by w, while the clip is around a recent policy. AReaL (arXiv:2505.24298) trains asynchronously
    with it; where it caps w it drops the tokens above, which is ``corrections.importance_weights(..., action="mask")``
    times :func:`clipped_surrogate`. Here ``w_max=c`` truncates. The paper has no cap.

    If the proximal policy is the sampler's in other numerics, this is truncated importance sampling.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        old_log_probs: float, like log_probs: the proximal policy, which the clip is around.
        rollout_log_probs: float, like log_probs: the behaviour policy, which sampled.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        clip_low, clip_high: ε below and above 1, of the ratio.
        w_max: largest weight, at least 1; None: no bound but the ±20 of every log-ratio.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; clip_low outside [0, 1], clip_high < 0, or w_max < 1.

    >>> import torch
    >>> m = torch.ones(1, 1, dtype=torch.bool)
    >>> zero = torch.zeros(1, 1)
    >>> decoupled_ppo(zero + 0.5, zero, zero - 1, zero + 1, m)  # e, times the clipped 1.2
    tensor([[-3.2619]])
    """
    check_tokens(
        response_mask,
        cu_seqlens,
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        rollout_log_probs=rollout_log_probs,
        advantages=advantages,
    )
    check_ratio_bounds(clip_low, clip_high)
    if w_max is not None and w_max < 1:
        raise ValueError(f"w_max={w_max} must be at least 1, or None for no bound")
    rule = partial(_weighted, clip_low=clip_low, clip_high=clip_high, w_max=math.inf if w_max is None else w_max)
    return with_slope(rule, response_mask, log_probs, old_log_probs, rollout_log_probs, advantages)


def _weighted(
    log_probs: PerToken,
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    advantages: PerToken,
    *,
    clip_low: float,
    clip_high: float,
    w_max: float,
) -> tuple[PerToken, Tensor]:
    loss, open_to_gradient = clipped(log_probs, old_log_probs, advantages, clip_low=clip_low, clip_high=clip_high)
    stale, _ = limited_log_ratio(old_log_probs, rollout_log_probs)
    return loss.mul_(stale.exp_().clamp_(max=w_max)), open_to_gradient
