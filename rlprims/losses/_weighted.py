"""Policy losses −w A log π: REINFORCE, and REINFORCE with a constant weight w; losses on demonstrations; entropy."""

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.losses._clipped import clipped_surrogate
from rlprims.masking import check_above, check_at_least, check_choice, check_finite, check_tokens, upcast, zero_outside
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

    The bounds are bounds of the weight, 0 <= w_min <= 1 <= w_max, not distances from 1. TRL's ``epsilon_high`` is
    ``w_max``; with its default of 0.2 almost every weight is 0.2. verl, slime and NeMo-RL use ``w_min=1 - eps``,
    ``w_max=1 + eps``; SkyRL uses 0 and 5, as here. The paper tunes only the upper bound. torchrl's loss of this name is
    the clipped ratio times A, so a clipped token gets no gradient there.

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
    loss = −A log_probs if A > 0, else −w A log_probs. Good responses are imitated with weight 1. The weight of a bad
    response goes to 0 as it becomes unlikely, so that the loss does not diverge and needs no KL term.

    The paper splits by the sign of a response's reward, this function by the sign of the advantage: use advantages with
    the same sign. ROLL splits by the raw score and has a ratio per token, which is ``level="token"``.

    Args:
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
    check_at_least(1, ", the weight on policy", inf=True, w_max=w_max)

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
    both sides, for large w faster if λ is larger. k and λ are k_pos, lambda_pos if A > 0, else k_neg, lambda_neg.

    w is not divided by the length, so for a long response a small change per token makes φ almost 0. The defaults are
    TRL's; all four are at least 0. TRL uses the ratio to its old policy and multiplies it by the sampler's weights;
    without bounds the product is the ratio to the sampler. TRL aggregates with the token mean.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> vespo(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.0]]), torch.ones(1, 2), m)
    tensor([[0.3882, 0.3882]])
    """
    check_tokens(
        response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages
    )
    check_at_least(0, k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg)

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

    loss = −(A − shift) log π with A = reward − group mean, and no ratio; the paper calls the shift δV. On responses of
    another policy, a baseline below the mean reward (a negative shift) gives good responses more weight than bad ones,
    which prevents a collapse of training. On policy the shift changes only the variance, not the expected gradient. Do
    not divide the advantages by a standard deviation: the shift is in units of the reward.

    >>> asymre(torch.tensor([[-1.0, -1.0]]), torch.tensor([[0.5, -0.5]]), torch.ones(1, 2, dtype=torch.bool))
    tensor([[ 0.6000, -0.4000]])
    """
    check_finite(shift=shift)
    return reinforce(log_probs, upcast(advantages) - shift, response_mask, cu_seqlens)


@described
@token_wise
def nll(log_probs: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """Negative log-likelihood, the loss of supervised fine-tuning: loss = −log π, in nats.

    It is :func:`reinforce` with A = 1. On the correct responses only it is the imitation term of VAPO (Yue et al. 2025,
    arXiv:2504.05118): give the loss and the aggregation a mask that is True on those responses only, as a
    :class:`~rlprims.algorithms.LossTerm` with ``over="term"`` does.

    >>> nll(torch.tensor([[-0.5, -9.0]]), torch.tensor([[True, False]]))
    tensor([[0.5000, -0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs)
    return -zero_outside(log_probs, response_mask)


@described
@token_wise
def dft(log_probs: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """Dynamic fine-tuning, Wu et al. 2025 (arXiv:2508.05629): loss = −p log π with p = π as a constant.

    The gradient of :func:`nll` is that of −π times 1/π, which is largest for unlikely tokens. The factor p cancels it.

    >>> dft(torch.tensor([[0.5, 0.1]]).log(), torch.tensor([[True, False]]))
    tensor([[0.3466, 0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs)
    p = zero_outside(log_probs.detach(), response_mask).exp()
    return reinforce(log_probs, p, response_mask, cu_seqlens)


@described
@token_wise
def chord_phi(log_probs: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """CHORD-φ, Zhang et al. 2025 (arXiv:2508.11408): loss = −p (1 − p) log π with p = π as a constant.

    The weight is largest, 1/4, at p = 1/2. It is small for tokens that are likely already, which preserves the entropy,
    and for tokens that are very unlikely, whose gradients would disturb the policy.

    >>> chord_phi(torch.tensor([[0.5, 0.1]]).log(), torch.tensor([[True, False]]))
    tensor([[0.1733, 0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs)
    p = zero_outside(log_probs.detach(), response_mask).exp()
    return reinforce(log_probs, p * (1 - p), response_mask, cu_seqlens)


@described
@token_wise
def luffy(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    expert_mask: TokenMask,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    gamma: float = 0.1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PerToken:
    """LUFFY, Yan et al. 2025 (arXiv:2504.14945): groups with responses of an expert and of the policy.

    On the expert's tokens loss = −A f(π) with f(x) = x / (x + γ), and no clip. The expert's probability is assumed to
    be 1, and the derivative of f, γ / (x + γ)², is largest for tokens that are unlikely under the policy. On the
    policy's own tokens the loss is :func:`clipped_surrogate`. The aggregation is one mean over both kinds of tokens.

    Args:
        old_log_probs: policy at the start of the step; not used on the expert's tokens.
        advantages: computed from groups that include the expert's responses.
        expert_mask: True on tokens that an expert wrote.
        response_mask: True on tokens of the policy and of the expert.
        gamma: γ > 0, the probability at which f is 1/2.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> log_probs, expert = torch.tensor([[0.4, 0.4]]).log(), torch.tensor([[True, False]])
    >>> luffy(log_probs, log_probs, torch.ones(1, 2), expert, m)
    tensor([[-0.8000, -1.0000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, advantages=advantages, expert_mask=expert_mask)
    check_above(0, ": the probability at which f is 1/2", gamma=gamma)
    own, expert = response_mask & ~expert_mask, response_mask & expert_mask
    surrogate = clipped_surrogate(
        log_probs, old_log_probs, advantages, own, cu_seqlens, clip_low=clip_low, clip_high=clip_high
    )
    # x / (x + γ) = σ(log x − log γ), which does not overflow
    f = (zero_outside(log_probs, expert) - math.log(gamma)).sigmoid()
    return torch.where(expert, -zero_outside(advantages, expert).detach() * f, surrogate)


@described
@token_wise
def negative_entropy(entropies: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """Entropy bonus as a loss, Williams & Peng 1991: loss = −H(π(· | s_t)). Minimizing it increases exploration.

    >>> negative_entropy(torch.tensor([[0.7, 0.3]]), torch.tensor([[True, False]]))
    tensor([[-0.7000, -0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, entropies=entropies)
    return -zero_outside(entropies, response_mask)
