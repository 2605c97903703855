"""Losses on demonstrations: the negative log-likelihood, its weighted variants, and LUFFY; and the entropy bonus.

The mask is True on the tokens to imitate.
"""

import math

import torch

from rlprims._described import described
from rlprims.losses._clipped import clipped_surrogate
from rlprims.losses._weighted import reinforce
from rlprims.masking import check_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask, token_wise


@described
@token_wise
def nll(log_probs: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """Negative log-likelihood, the loss of supervised fine-tuning: loss = −log π, in nats.

    It is :func:`reinforce` with A = 1. On the correct responses only it is the imitation term of VAPO (Yue et al. 2025,
    arXiv:2504.05118): give the loss and the aggregation a mask that is True on those responses only, so that the mean
    is over their tokens. A :class:`~rlprims.algorithms.LossTerm` with ``over="term"`` does so.

    Args:
        response_mask: the tokens to imitate.

    >>> import torch
    >>> nll(torch.tensor([[-0.5, -9.0]]), torch.tensor([[True, False]]))
    tensor([[0.5000, -0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs)
    return -zero_outside(log_probs, response_mask)


@described
@token_wise
def dft(log_probs: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """Dynamic fine-tuning, Wu et al. 2025 (arXiv:2508.05629): loss = −p log π with p = π as a constant.

    The gradient of :func:`nll` is that of −π with the weight 1/π, which is largest for unlikely tokens. The factor p
    cancels this weight: the gradient is that of −π.

    >>> import torch
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

    >>> import torch
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
        clip_low, clip_high: as in :func:`clipped_surrogate`, for the policy's own tokens.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> log_probs, expert = torch.tensor([[0.4, 0.4]]).log(), torch.tensor([[True, False]])
    >>> luffy(log_probs, log_probs, torch.ones(1, 2), expert, m)
    tensor([[-0.8000, -1.0000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, advantages=advantages, expert_mask=expert_mask)
    if not gamma > 0:
        raise ValueError(f"gamma={gamma}, expected a number above 0: the probability at which f is 1/2")
    own, expert = response_mask & ~expert_mask, response_mask & expert_mask
    surrogate = clipped_surrogate(
        log_probs, old_log_probs, advantages, own, cu_seqlens, clip_low=clip_low, clip_high=clip_high
    )
    # x / (x + γ) = σ(log x − log γ), which does not overflow
    f = (zero_outside(log_probs, expert) - math.log(gamma)).sigmoid()
    return torch.where(expert, -zero_outside(advantages, expert).detach() * f, surrogate)


@described
@token_wise
def entropy(entropies: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """Entropy bonus as a loss, Williams & Peng 1991: loss = −H(π(· | s_t)). Minimizing it increases exploration.

    Args:
        entropies: in nats; only they get a gradient. See ``logprobs.entropy_from_logits``.

    >>> import torch
    >>> entropy(torch.tensor([[0.7, 0.3]]), torch.tensor([[True, False]]))
    tensor([[-0.7000, -0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, entropies=entropies)
    return -zero_outside(entropies, response_mask)
