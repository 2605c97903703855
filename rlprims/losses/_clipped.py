"""Policy losses with a clipped ratio to an older policy, PPO and its variants, or with a trust region in probability.

In the former ``ratio`` = exp(log_probs − old_log_probs), and clip bounds are distances of the ratio from 1. Every
log-ratio is clamped to ±20 before ``exp``; outside of this range the gradient is 0.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.masking import check_above, check_at_least, check_choice, check_range, check_tokens, zero_outside
from rlprims.ratios import log_ratio
from rlprims.types import CuSeqlens, PerToken, TokenMask, token_wise


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raise ``ValueError`` unless 0 <= 1 − clip_low <= 1 <= 1 + clip_high."""
    check_range(0, 1, clip_low=clip_low)
    check_at_least(0, inf=True, clip_high=clip_high)


def check_max_weight(w_max: float | None) -> None:
    """Raise ``ValueError`` unless the largest weight is None or at least 1, which is the weight on policy."""
    check_at_least(1, ", or None for no bound", inf=True, w_max=w_max)


def truncate(weights: Tensor, w_max: float | None) -> Tensor:
    """min(weights, w_max); None: no bound."""
    return weights if w_max is None else weights.clamp(max=w_max)


@described
@token_wise
def clipped_surrogate(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PerToken:
    """PPO's clipped surrogate, Schulman et al. 2017 (arXiv:1707.06347), eq. 7, with asymmetric bounds.

    With ρ = exp(log_probs − old_log_probs): loss = −min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A).
    DAPO's clip-higher (arXiv:2503.14476, eq. 10) is ``clip_high=0.28``. ``dual_clip=c`` > 1 bounds the loss of tokens
    with A < 0 from above by c |A| (Ye et al. 2020, arXiv:1912.09729, eq. 5). verl always applies it with c = 3; TRL and
    NeMo-RL do not by default. The two-sided clip of INTELLECT-2 (arXiv:2505.07291; TRL's ``delta``) is ``dual_clip``.
    Exactly on a bound the gradient is that of the unclipped term.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> clipped_surrogate(torch.tensor([[0.5, 0.5]]), torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), m)
    tensor([[-1.2000,  1.6487]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_clip(clip_low, clip_high)
    check_above(1, " (usually 3.0), or None for no dual clip", dual_clip=dual_clip)

    advantages = zero_outside(advantages, response_mask).detach()  # makes the losses 0 there
    ratio = log_ratio(log_probs, old_log_probs, response_mask).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -torch.minimum(advantages * ratio, advantages * clipped_ratio)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, losses.clamp(max=-advantages * dual_clip), losses)
    return losses


@described
@token_wise
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
    """Decoupled PPO, Hilton et al. 2021 (arXiv:2110.00641): separate proximal and behaviour policies.

    With ρ = exp(log_probs − old_log_probs) to the proximal policy, and the constant weight w = exp(old_log_probs −
    rollout_log_probs) of the proximal to the behaviour policy: loss = −w min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high)
    A). w corrects for stale responses, while the clip is around a recent policy, for example in asynchronous training
    (AReaL, arXiv:2505.24298). AReaL drops the tokens above its cap: ``corrections.importance_weights(...,
    action="mask")`` times :func:`clipped_surrogate`; ``w_max`` truncates w. The paper has no cap.

    Args:
        old_log_probs: the proximal policy, the centre of the clip.
        rollout_log_probs: the behaviour policy, which sampled the tokens.

    >>> m = torch.ones(1, 1, dtype=torch.bool)
    >>> zero = torch.zeros(1, 1)
    >>> decoupled_ppo(zero + 0.5, zero, zero - 1, zero + 1, m)  # −e · 1.2
    tensor([[-3.2619]])
    """
    check_tokens(response_mask, cu_seqlens, rollout_log_probs=rollout_log_probs, old_log_probs=old_log_probs)
    check_max_weight(w_max)

    weights = log_ratio(old_log_probs.detach(), rollout_log_probs, response_mask).exp()
    return truncate(weights, w_max) * clipped_surrogate(
        log_probs, old_log_probs, advantages, response_mask, cu_seqlens, clip_low=clip_low, clip_high=clip_high
    )


@described
@token_wise
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
    """Gradient-preserving clip, Su et al. 2025 (arXiv:2508.07629): clipped tokens keep a bounded gradient.

    With ρ = exp(log_probs − old_log_probs)::

        ρ > 1 + clip_high, A > 0:   −beta_high (1 + clip_high) ρ / sg(ρ) A
        ρ < 1 − clip_low,  A < 0:   −beta_low (1 − clip_low) ρ / sg(ρ) A
        otherwise:                  −ρ A

    The gradient of a clipped token is its gradient at the bound times beta, at least 0. If both are 0 it is PPO's, if
    both are 1 GPPO's. CE-GPPO (Su et al. 2025, arXiv:2509.20712) controls the entropy with the betas; its authors start
    from ``beta_low=0.75, beta_high=1.0``. They also apply a dual clip of 3, which is not in the papers' equations.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> gppo(torch.tensor([[0.5, 0.5]]), torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), m)
    tensor([[-1.2000,  1.6487]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_clip(clip_low, clip_high)
    check_at_least(0, beta_low=beta_low, beta_high=beta_high)

    advantages = zero_outside(advantages, response_mask).detach()  # makes the losses 0 there
    ratio = log_ratio(log_probs, old_log_probs, response_mask).exp()
    one = ratio / ratio.detach()  # 1, with the gradient of the log-ratio
    low, high = 1 - clip_low, 1 + clip_high
    surrogate = torch.where((ratio > high) & (advantages > 0), beta_high * high * one, ratio)
    surrogate = torch.where((ratio < low) & (advantages < 0), beta_low * low * one, surrogate)
    return -surrogate * advantages


@described
@token_wise
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
    """Asymmetric importance sampling, Wang et al. 2025 (arXiv:2510.06062): tokens with A > 0 have the inverse ratio.

    With ρ = exp(log_probs − old_log_probs) and the constant w = 1/ρ if A > 0, else w = ρ: loss = −M w A ρ / sg(ρ), so
    that the gradient is −M w A. M is 0 for the tokens that PPO clips (ρ > 1 + clip_high with A > 0, or
    ρ < 1 − clip_low with A < 0), else 1. For A > 0, tokens that became less likely have a larger weight and tokens that
    became more likely a smaller one; PPO does the opposite. For A < 0 the weights are PPO's. ``w_max=c`` bounds w by c
    and keeps the gradient, for both signs of A: the paper's soft dual clip, without a threshold in the paper.

    >>> m = torch.ones(1, 3, dtype=torch.bool)
    >>> p, old_p = torch.tensor([[0.3, 0.4, 0.4]]), torch.tensor([[0.4, 0.3, 0.3]])
    >>> aspo(p.log(), old_p.log(), torch.tensor([[1.0, 1.0, -1.0]]), m)
    tensor([[-1.3333, -0.0000,  1.3333]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_clip(clip_low, clip_high)
    check_max_weight(w_max)

    advantages = zero_outside(advantages, response_mask).detach()  # makes the losses 0 there
    log_rho = log_ratio(log_probs, old_log_probs, response_mask)
    ratio = log_rho.exp()
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    weights = torch.where(advantages > 0, -log_rho, log_rho).detach().exp()
    weights = torch.where(too_high | too_low, 0.0, truncate(weights, w_max))
    return -weights * advantages * (ratio / ratio.detach())


@described
@token_wise
def sapo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PerToken:
    """Soft adaptive policy optimization, Gao et al. 2025 (arXiv:2511.20347): a sigmoid gate replaces the clip.

    With ρ = exp(log_probs − old_log_probs), and the steepness τ > 0, tau_pos if A > 0, else tau_neg:
    loss = −(4 / τ) σ(τ (ρ − 1)) A. On policy the loss is −2 A / τ, not −A, and the gradient REINFORCE's. For other ρ it
    is smaller, but never 0. Aggregate with ``seq_mean_token_mean``, as the paper and verl; AReaL uses the token mean.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> sapo(torch.tensor([[0.0, 0.5]]), torch.zeros(1, 2), torch.ones(1, 2), m)
    tensor([[-2.0000, -2.6269]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_above(0, tau_pos=tau_pos, tau_neg=tau_neg)

    advantages = zero_outside(advantages, response_mask).detach()  # makes the losses 0 there
    ratio = log_ratio(log_probs, old_log_probs, response_mask).exp()
    tau = torch.where(advantages > 0, tau_pos, torch.full_like(advantages, tau_neg))
    gate = 4 * torch.sigmoid(tau * (ratio - 1)) / tau
    return -gate * advantages


Divergence: TypeAlias = Literal["tv", "kl"]

_MIN_REST = 1e-8
"""The smallest probability of all other tokens, so that its logarithm is finite."""


@described
@token_wise
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
    """Divergence PPO, Qi et al. 2026 (arXiv:2602.04879), eq. 11: a trust region in the probability of a token.

    With p = exp(log_probs), q = exp(rollout_log_probs) and ρ = p / q: loss = −M ρ A. M is 0 if the token is outside the
    region and its advantage would move it further away, else 1. The outcomes are this token and any other::

        tv: M = 0 if A > 0 and p − q > threshold_high, or if A < 0 and q − p > threshold_low
        kl: KL = q log(q / p) + (1 − q) log((1 − q) / (1 − p));
            M = 0 if A > 0, p > q and KL > threshold_high, or if A < 0, p < q and KL > threshold_low

    The centre is the policy that sampled, as the paper advises (section 5.2); verl uses its old_log_prob for any
    policy. The default thresholds are the authors' for tv; for kl theirs are 0.05. ``w_max=c`` bounds ρ, as a weight,
    by c, as verl does with ``clip_ratio_c``. prime-rl's default adds a term in log(ρ)².

    Args:
        divergence: "tv", total variation; or "kl".
        threshold_low, threshold_high: for tokens with p < q, and with p > q; in probability or in nats, at least 0.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> p, q = torch.tensor([[0.9, 0.01]]), torch.tensor([[0.6, 0.001]])
    >>> dppo(p.log(), q.log(), torch.ones(1, 2), m)  # only the first token is outside the region
    tensor([[ -0., -10.]])
    """
    check_tokens(
        response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages
    )
    check_choice("divergence", divergence, Divergence)
    check_max_weight(w_max)
    check_at_least(0, inf=True, threshold_low=threshold_low, threshold_high=threshold_high)

    advantages = zero_outside(advantages, response_mask).detach()  # makes the losses 0 there
    log_p = zero_outside(log_probs, response_mask).detach()
    log_q = zero_outside(rollout_log_probs, response_mask).detach()
    p, q = log_p.exp(), log_q.exp()
    log_rho = log_ratio(log_probs, rollout_log_probs, response_mask)
    ratio = log_rho.exp()

    distance = (p - q).abs() if divergence == "tv" else _binary_kl(log_p, log_q, log_rho.detach())
    too_high = (advantages > 0) & (p > q) & (distance > threshold_high)
    too_low = (advantages < 0) & (p < q) & (distance > threshold_low)
    weights = torch.where(too_high | too_low, 0.0, truncate(ratio.detach(), w_max))
    return -weights * advantages * (ratio / ratio.detach())


def _binary_kl(log_p: Tensor, log_q: Tensor, log_rho: Tensor) -> Tensor:
    """KL(q ‖ p) of two outcomes, the token and any other: q log(q / p) + (1 − q) log((1 − q) / (1 − p))."""
    rest_p, rest_q = (-torch.expm1(x).clamp(max=-_MIN_REST) for x in (log_p, log_q))  # 1 − p, 1 − q
    return rest_q * (rest_q / rest_p).log() - log_q.exp() * log_rho


@described
@token_wise
def tv_symmetric(
    log_probs: PerToken,
    rollout_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    threshold: float = 0.1,
) -> PerToken:
    """A symmetric trust region: the loss −ρ A on the tokens whose probability changed by at most ``threshold``.

    With p = exp(log_probs), q = exp(rollout_log_probs) and ρ = p / q: loss = −M ρ A, with M = 1 if
    |p − q| <= threshold, else 0. prime-rl calls it IPO, although it is not the preference loss of that name, and adds
    0.001 (log ρ)², which is ``kl`` to the sampler with k2 and twice that coefficient.

    Unlike in :func:`dppo`, a token outside the region gets no gradient for any sign of A, not even towards it.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> p, q = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.2]])
    >>> tv_symmetric(p.log(), q.log(), torch.tensor([[-1.0, -1.0]]), m)
    tensor([[0.0000, 1.2500]])
    """
    check_tokens(
        response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages
    )
    check_at_least(0, ": a difference of probabilities", inf=True, threshold=threshold)

    advantages = zero_outside(advantages, response_mask).detach()  # makes the losses 0 there
    p = zero_outside(log_probs, response_mask).detach().exp()
    q = zero_outside(rollout_log_probs, response_mask).detach().exp()
    ratio = log_ratio(log_probs, rollout_log_probs, response_mask).exp()
    ratio = torch.where((p - q).abs() <= threshold, ratio, 0.0)
    return -ratio * advantages
