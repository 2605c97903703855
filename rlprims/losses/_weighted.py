"""Policy losses −w A log π: REINFORCE, and REINFORCE with a constant weight w.

:func:`reinforce` applies the mask to weights and advantages, which have no gradient.
"""

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.masking import check_choice, check_tokens, upcast, zero_outside
from rlprims.ratios import log_ratio, sequence_log_ratio
from rlprims.types import AllReduce, CuSeqlens, PerToken, TokenMask, token_wise

Level: TypeAlias = Literal["sequence", "token"]


@described
@token_wise
def reinforce(
    log_probs: PerToken, advantages: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None
) -> PerToken:
    """REINFORCE, Williams 1992, eq. 4: loss = −A log π, whose gradient is the policy gradient.

    With A = 1 it is the negative log-likelihood of supervised fine-tuning. GPG (Chu et al. 2025, arXiv:2504.02546) is
    this loss with the advantages of :func:`rlprims.advantage.gpg`.

    >>> reinforce(torch.tensor([[-0.5, -9.0]]), torch.tensor([[2.0, 1.0]]), torch.tensor([[True, False]]))
    tensor([[1., 0.]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, advantages=advantages)
    advantages = zero_outside(advantages, response_mask).detach()
    return zero_outside(-advantages * log_probs, response_mask)


@described
@token_wise
def cispo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    w_min: float = 0.0,
    w_max: float = 5.0,
) -> PerToken:
    """Clipped importance weights, MiniMax-M1 2025 (arXiv:2506.13585), eq. 4: every token keeps a gradient.

    With ρ = exp(log_probs − old_log_probs) and w = clip(ρ, w_min, w_max) as a constant: loss = −w A log_probs.

    The bounds are bounds of the weight, not distances from 1. TRL's ``epsilon_high`` is ``w_max``; with its default of
    0.2 almost every weight is 0.2. verl, slime and NeMo-RL use ``w_min=1 - eps, w_max=1 + eps``; SkyRL uses 0 and 5, as
    here. The paper tunes only the upper bound. torchrl's loss of this name is the clipped ratio times A, without a
    stopped gradient and without log_probs, so a clipped token gets no gradient there.

    Args:
        w_min, w_max: smallest and largest weight, with 0 <= w_min <= 1 <= w_max, so that the weight on policy is 1.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> cispo(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -9.0]]), torch.ones(1, 2), m)
    tensor([[1., 5.]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    if not 0 <= w_min <= 1 <= w_max:
        raise ValueError(
            f"w_min={w_min} and w_max={w_max}, expected w_min in [0, 1] and w_max at least 1: they bound the weight, "
            "which is 1 on policy; for a distance eps from 1 use 1 - eps and 1 + eps"
        )
    weights = log_ratio(log_probs.detach(), old_log_probs, response_mask).exp().clamp(w_min, w_max)
    return reinforce(log_probs, weights * advantages, response_mask, cu_seqlens)


@described
def topr(
    log_probs: PerToken,
    rollout_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    level: Level = "sequence",
    w_max: float = 1.0,
    all_reduce_rows: AllReduce | None = None,
) -> PerToken:
    """Tapered off-policy REINFORCE, Le Roux et al. 2025 (arXiv:2503.14286): importance weights for bad responses only.

    With ρ = exp(Σ_t log_probs − rollout_log_probs) of the response and the constant w = clip(ρ, 0, w_max):
    loss = −A log_probs if A > 0, else −w A log_probs. Good responses are imitated with weight 1, however unlikely they
    have become. The weight of a bad response goes to 0 as it becomes unlikely, so that the loss does not diverge and
    needs no KL term.

    The paper splits by the sign of a response's reward, this function by the sign of the advantage: use advantages with
    the same sign. ROLL splits by the raw score and has a ratio per token, which is ``level="token"``.

    Args:
        rollout_log_probs: the policy that sampled; it may be old.
        level: "sequence", the product of the response's ratios; or "token", each token's own.
        w_max: largest weight of a bad token, at least 1.

    >>> m = torch.ones(2, 1, dtype=torch.bool)
    >>> log_probs, rollout = torch.tensor([[-2.0], [-2.0]]), torch.tensor([[-1.0], [-1.0]])
    >>> topr(log_probs, rollout, torch.tensor([[1.0], [-1.0]]), m)
    tensor([[ 2.0000],
            [-0.7358]])
    """
    check_tokens(
        response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages
    )
    check_choice("level", level, Level)
    if not w_max >= 1:
        raise ValueError(f"w_max={w_max}, expected a number of at least 1, the weight on policy")

    if level == "sequence":
        constants = log_probs.detach(), rollout_log_probs, response_mask, cu_seqlens
        log_rho = sequence_log_ratio(*constants, mean=False, all_reduce_rows=all_reduce_rows)
    else:
        log_rho = log_ratio(log_probs.detach(), rollout_log_probs, response_mask)
    weights = torch.where(advantages > 0, 1.0, log_rho.exp().clamp(max=w_max))
    return reinforce(log_probs, weights * advantages, response_mask, cu_seqlens)


@described
def vespo(
    log_probs: PerToken,
    rollout_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    all_reduce_rows: AllReduce | None = None,
) -> PerToken:
    """Variational sequence-level soft policy optimization, Shen et al. 2026 (arXiv:2602.10693): a smooth weight φ(w).

    With w = exp(Σ_t log_probs − rollout_log_probs), the product of the response's ratios, and the constant
    φ(w) = w^k exp(λ (1 − w)): loss = −φ(w) A log_probs. φ is 1 on policy, has its maximum at w = k / λ and goes to 0 on
    both sides; a larger λ makes it fall faster for large w. (k, λ) are k_pos and lambda_pos if A > 0, else k_neg and
    lambda_neg.

    w is not divided by the length, so for a long response a small change per token makes φ almost 0. The defaults are
    TRL's. TRL uses the ratio to its old policy and multiplies it by the sampler's weights, which may be truncated or
    masked; without bounds the product is the ratio to the sampler. TRL aggregates with the token mean.

    Args:
        k_pos, k_neg: power of w, at least 0.
        lambda_pos, lambda_neg: rate of the decay in w, at least 0.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> vespo(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.0]]), torch.ones(1, 2), m)
    tensor([[0.3882, 0.3882]])
    """
    check_tokens(
        response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages
    )
    if not all(x >= 0 for x in (k_pos, lambda_pos, k_neg, lambda_neg)):
        raise ValueError(f"{k_pos=}, {lambda_pos=}, {k_neg=} and {lambda_neg=}, expected numbers of at least 0")

    constants = log_probs.detach(), rollout_log_probs, response_mask, cu_seqlens
    log_w = sequence_log_ratio(*constants, mean=False, all_reduce_rows=all_reduce_rows)
    phi = torch.where(advantages > 0, _phi(log_w, k_pos, lambda_pos), _phi(log_w, k_neg, lambda_neg))
    return reinforce(log_probs, phi * advantages, response_mask, cu_seqlens)


def _phi(log_w: Tensor, k: float, rate: float) -> Tensor:
    """w^k exp(rate (1 − w))."""
    return (k * log_w - rate * torch.expm1(log_w)).exp()


@described
@token_wise
def asymre(
    log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    shift: float = -0.1,
) -> PerToken:
    """Asymmetric REINFORCE, Arnal et al. 2025 (arXiv:2506.20520): a shifted baseline, for stale responses.

    loss = −(A − shift) log π, without an importance ratio. On responses of another policy, a baseline below the mean
    reward (a negative shift) gives good responses more weight than bad ones, which prevents a collapse of training; a
    positive shift does the opposite. On policy the shift changes only the variance, not the expected gradient.

    Use advantages that are not divided by a standard deviation: the shift is in units of the reward.

    Args:
        advantages: reward minus the mean of its group.
        shift: added to the baseline, the paper's δV.

    >>> asymre(torch.tensor([[-1.0, -1.0]]), torch.tensor([[0.5, -0.5]]), torch.ones(1, 2, dtype=torch.bool))
    tensor([[ 0.6000, -0.4000]])
    """
    if math.isnan(shift):
        raise ValueError(f"shift={shift}, expected a number in units of the reward")
    return reinforce(log_probs, upcast(advantages) - shift, response_mask, cu_seqlens)
