"""Policy losses with a trust region in probability: tokens outside of the region get no gradient.

The centre of the region is the policy that sampled, so both take ``rollout_log_probs``. With p and q the probabilities
of a token under the current policy and under the sampler, the loss inside the region is −ρ A with ρ = p / q.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.losses._clipped import check_max_weight, truncate
from rlprims.masking import check_choice, check_tokens, zero_outside
from rlprims.ratios import log_ratio
from rlprims.types import CuSeqlens, PerToken, TokenMask, token_wise

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

    With p = exp(log_probs), q = exp(rollout_log_probs) and ρ = p / q: loss = −M ρ A. M is 0 if the token is outside of
    the region and its advantage would move it further away, else 1. The divergence has two outcomes, this token and any
    other token::

        tv: M = 0 if A > 0 and p − q > threshold_high, or if A < 0 and q − p > threshold_low
        kl: KL = q log(q / p) + (1 − q) log((1 − q) / (1 − p));
            M = 0 if A > 0, p > q and KL > threshold_high, or if A < 0, p < q and KL > threshold_low

    The centre of the region is the policy that sampled, as the paper advises (section 5.2); verl uses its old_log_prob
    for any policy. The default thresholds are the authors' for tv; for kl theirs are 0.05. ``w_max=c`` bounds ρ, as a
    weight, by c, as verl does with ``clip_ratio_c``. The value of verl's loss is −M sg(ρ) A log_probs, which has the
    same gradient; prime-rl's default adds a term in log(ρ)².

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
    if not (threshold_low >= 0 and threshold_high >= 0):
        raise ValueError(
            f"threshold_low={threshold_low} and threshold_high={threshold_high}, expected numbers of at least 0"
        )

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

    Unlike :func:`dppo` it does not depend on the sign of the advantage: a token outside of the region gets no gradient,
    not even towards the region. It filters out the tokens on which sampler and trainer disagree.

    Args:
        threshold: at least 0, a difference of probabilities.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> p, q = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.2]])
    >>> tv_symmetric(p.log(), q.log(), torch.tensor([[-1.0, -1.0]]), m)
    tensor([[0.0000, 1.2500]])
    """
    check_tokens(
        response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages
    )
    if not threshold >= 0:
        raise ValueError(f"threshold={threshold}, expected a number of at least 0: a difference of probabilities")

    advantages = zero_outside(advantages, response_mask).detach()  # makes the losses 0 there
    p = zero_outside(log_probs, response_mask).detach().exp()
    q = zero_outside(rollout_log_probs, response_mask).detach().exp()
    ratio = log_ratio(log_probs, rollout_log_probs, response_mask).exp()
    ratio = torch.where((p - q).abs() <= threshold, ratio, 0.0)
    return -ratio * advantages
