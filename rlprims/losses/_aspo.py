"""See :func:`aspo`."""

from functools import partial

import torch
from torch import Tensor

from rlprims.losses._bounds import check_ratio_bounds
from rlprims.losses._with_slope import limited_log_ratio, with_slope
from rlprims.masking import check_tokens, upcast
from rlprims.types import CuSeqlens, PerToken, TokenMask


def aspo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    w_max: float | None = None,
) -> PerToken:
    """Asymmetric importance sampling, Wang et al. 2025 (arXiv:2510.06062): good tokens have the ratio upside down.

    With ρ = exp(log_probs − old_log_probs) and the constant w = 1/ρ where A > 0, ρ elsewhere:
    loss = −M w A ρ / sg(ρ), so that the gradient is −M w A. M is 0 where PPO's clip stops a token (ρ > 1 + clip_high
    with A > 0, ρ < 1 − clip_low with A < 0), else 1. A good token that fell behind counts for more, one that is ahead
    for less: the reverse of PPO, and what PPO does to bad ones.

    1/ρ is the weight and not the function that is differentiated: its own derivative has the wrong sign.

    ``w_max=c`` holds w at c and keeps the gradient, the paper's soft dual clip, for both signs of A; the paper gives no
    threshold, so there is none by default.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        old_log_probs: float, like log_probs: policy at the start of the step.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        clip_low, clip_high: ε below and above 1, of ρ.
        w_max: largest weight, at least 1; None: no bound.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; clip_low outside [0, 1], clip_high < 0, or w_max < 1.

    >>> m = torch.ones(1, 3, dtype=torch.bool)
    >>> now, then = torch.tensor([[0.3, 0.4, 0.4]]).log(), torch.tensor([[0.4, 0.3, 0.3]]).log()
    >>> aspo(now, then, torch.tensor([[1.0, 1.0, -1.0]]), m)
    tensor([[-1.3333, -0.0000,  1.3333]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_ratio_bounds(clip_low, clip_high)
    if w_max is not None and w_max < 1:
        raise ValueError(f"w_max={w_max} must be at least 1, or None for no bound")
    rule = partial(_weighted, low=1 - clip_low, high=1 + clip_high, w_max=torch.inf if w_max is None else w_max)
    return with_slope(rule, response_mask, log_probs, old_log_probs, advantages)


def _weighted(
    log_probs: PerToken, old_log_probs: PerToken, advantages: PerToken, *, low: float, high: float, w_max: float
) -> tuple[PerToken, Tensor]:
    log_rho, moves = limited_log_ratio(log_probs, old_log_probs)
    a, rho = upcast(advantages), log_rho.exp()
    stopped = ((a > 0) & (rho > high)) | ((a < 0) & (rho < low))
    weights = torch.where(a > 0, -log_rho, log_rho).exp_().clamp_(max=w_max)
    return -torch.where(stopped, 0.0, weights) * a, moves.bool()
