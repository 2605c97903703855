"""See :func:`gppo`."""

from functools import partial

import torch
from torch import Tensor

from rlprims.losses._bounds import check_ratio_bounds
from rlprims.losses._with_slope import limited_log_ratio, with_slope
from rlprims.masking import check_tokens, upcast
from rlprims.types import CuSeqlens, PerToken, TokenMask


def gppo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta_low: float = 1.0,
    beta_high: float = 1.0,
) -> PerToken:
    """Gradient-preserving clip, Su et al. 2025 (arXiv:2508.07629): PPO's value, and a bounded gradient where it is cut.

    With ρ = exp(log_probs − old_log_probs)::

        ρ > 1 + clip_high, A > 0:   −beta_high (1 + clip_high) ρ / sg(ρ) A
        ρ < 1 − clip_low,  A < 0:   −beta_low (1 − clip_low) ρ / sg(ρ) A
        elsewhere:                  −ρ A

    So a clipped token keeps the gradient that it had on the bound, times its beta. With both betas 0 it is PPO's
    gradient, with both 1 GPPO's; CE-GPPO (Su et al. 2025, arXiv:2509.20712) steers the entropy with them, and its
    authors start from ``beta_low=0.75, beta_high=1.0``. They also apply a dual clip of 3, which is not in the papers'
    equations.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        old_log_probs: float, like log_probs: policy at the start of the step.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        clip_low, clip_high: ε below and above 1, of the ratio.
        beta_low, beta_high: how much a clipped token keeps, at least 0.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; clip_low outside [0, 1], clip_high < 0, or a beta below 0.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> gppo(torch.tensor([[0.5, 0.5]]), torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), m)
    tensor([[-1.2000,  1.6487]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_ratio_bounds(clip_low, clip_high)
    if beta_low < 0 or beta_high < 0:
        raise ValueError(f"beta_low={beta_low} and beta_high={beta_high} must be at least 0")
    rule = partial(_held, low=1 - clip_low, high=1 + clip_high, beta_low=beta_low, beta_high=beta_high)
    return with_slope(rule, response_mask, log_probs, old_log_probs, advantages)


def _held(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    *,
    low: float,
    high: float,
    beta_low: float,
    beta_high: float,
) -> tuple[PerToken, Tensor]:
    near, moves = limited_log_ratio(log_probs, old_log_probs)
    ratio, a = near.exp_(), upcast(advantages)
    held = torch.where((ratio > high) & (a > 0), beta_high * high, ratio)
    held = torch.where((ratio < low) & (a < 0), beta_low * low, held)
    return -held * a, moves.bool()
