"""See :func:`dppo`."""

from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from rlprims.losses._with_slope import limited_log_ratio, with_slope
from rlprims.masking import check_tokens, positive, upcast
from rlprims.types import CuSeqlens, PerToken, TokenMask

Divergence: TypeAlias = Literal["tv", "kl"]

_LEAST_REST = 1e-8


def dppo(
    log_probs: PerToken,
    rollout_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    divergence: Divergence = "tv",
    threshold_low: float = 0.15,
    threshold_high: float = 0.15,
    w_max: float | None = None,
) -> PerToken:
    """Divergence PPO, Qi et al. 2026 (arXiv:2602.04879), eq. 11: a trust region in probability, not in the ratio.

    With p = exp(log_probs), q = exp(rollout_log_probs) and ρ = p / q: loss = −M ρ A. M is 0 where the token has left
    the region and its advantage would push it further, else 1. The binary divergences see two outcomes, this token
    and any other::

        tv: left above if p − q > threshold_high (A > 0); left below if q − p > threshold_low (A < 0)
        kl: KL = q log(q / p) + (1 − q) log((1 − q) / (1 − p));
            left above if KL > threshold_high and p > q (A > 0); below if KL > threshold_low and p < q (A < 0)

    The region is around the policy that sampled, as the paper advises (section 5.2), hence ``rollout_log_probs``; verl
    puts whatever it has as old_log_prob. The default thresholds are the authors' for tv; for kl theirs are 0.05.
    ``w_max=c`` holds ρ, as a weight, at c: verl does so at its ``clip_ratio_c``. verl's value is
    −M sg(ρ) A log_probs, another number with this gradient; prime-rl's default adds a term in log(ρ)².

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        rollout_log_probs: float, like log_probs: the sampler's own.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        divergence: "tv", total variation; or "kl".
        threshold_low, threshold_high: for tokens whose probability fell, and rose; in probability or in nats.
        w_max: largest weight, at least 1; None: no bound.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; an unknown divergence; a threshold below 0; w_max < 1.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> now, then = torch.tensor([[0.9, 0.01]]).log(), torch.tensor([[0.6, 0.001]]).log()
    >>> dppo(now, then, torch.ones(1, 2), m)  # the likely token has left, the unlikely one has not
    tensor([[  0., -10.]])
    """
    check_tokens(
        response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages
    )
    if threshold_low < 0 or threshold_high < 0:
        raise ValueError(f"threshold_low={threshold_low} and threshold_high={threshold_high} must be at least 0")
    if w_max is not None and w_max < 1:
        raise ValueError(f"w_max={w_max} must be at least 1, or None for no bound")
    if divergence not in get_args(Divergence):
        raise ValueError(f"unknown divergence {divergence!r}: choose 'tv' or 'kl'")
    rule = partial(
        _within,
        divergence=divergence,
        threshold_low=threshold_low,
        threshold_high=threshold_high,
        w_max=torch.inf if w_max is None else w_max,
    )
    return with_slope(rule, response_mask, log_probs, rollout_log_probs, advantages)


def _within(
    log_probs: PerToken,
    rollout_log_probs: PerToken,
    advantages: PerToken,
    *,
    divergence: Divergence,
    threshold_low: float,
    threshold_high: float,
    w_max: float,
) -> tuple[PerToken, Tensor]:
    log_rho, moves = limited_log_ratio(log_probs, rollout_log_probs)
    rise, distance = _moved(log_rho, upcast(log_probs), upcast(rollout_log_probs), divergence)
    a = upcast(advantages)
    good = positive(a, distance.dtype)
    none = torch.finfo(good.dtype).max  # not inf, which times 0 is NaN
    low, high = (torch.full_like(good, min(x, none)) for x in (threshold_low, threshold_high))
    threshold = torch.lerp(low, high, good)
    away = rise.mul_(a.sign()).gt_(0)  # 1.0 where a good token's probability rose, or a bad one's fell
    left = distance.gt_(threshold).mul_(away)
    return log_rho.exp_().clamp_(max=w_max).mul_(left.sub_(1)).mul_(a), moves.bool()


def _moved(log_rho: Tensor, now: Tensor, then: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """By how much the token's probability rose, and the divergence of the two outcomes it and not it."""
    rise = now.exp() - then.exp()
    if divergence == "tv":
        return rise, rise.abs()
    rest_then, rest_now = ((-torch.expm1(x)).clamp(min=_LEAST_REST) for x in (then, now))
    return rise, rest_then * (rest_then / rest_now).log() - then.exp() * log_rho
