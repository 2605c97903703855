"""Losses on demonstrations: the negative log-likelihood, weighed or not, and expert responses among the policy's own.

Also the entropy bonus, which like the likelihood needs no advantages.
"""

import math

import torch

from rlprims.losses._clipped import clipped_surrogate
from rlprims.losses._weighted import reinforce
from rlprims.masking import check_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask, token_wise


@token_wise
def nll(
    log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
) -> PerToken:
    """Negative log-likelihood, the loss of supervised fine-tuning: loss = −log π.

    It is :func:`reinforce` with A = 1. On the correct responses alone it is the imitation term of VAPO (Yue et al.
    2025, arXiv:2504.05118): give this and the aggregation a mask that is True on those responses only, so that the mean
    is over their tokens, which a :class:`~rlprims.algorithms.LossTerm` does with ``over="term"``.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        response_mask: bool, like log_probs: the tokens to imitate.
        cu_seqlens: int (B+1,) if packed; not read.

    Returns:
        float in nats, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> nll(torch.tensor([[-0.5, -9.0]]), torch.tensor([[True, False]]))
    tensor([[0.5000, -0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs)
    return -zero_outside(log_probs, response_mask)


@token_wise
def dft(
    log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
) -> PerToken:
    """Dynamic fine-tuning, Wu et al. 2025 (arXiv:2508.05629): loss = −p log π with p = π as a constant.

    Seen as a policy gradient, :func:`nll` weighs each token by 1/π, and an unlikely token moves the policy most. The
    factor π takes that weight away: the gradient is that of −π.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        response_mask: bool, like log_probs: the tokens to imitate.
        cu_seqlens: int (B+1,) if packed; not read.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> dft(torch.tensor([[0.5, 0.1]]).log(), torch.tensor([[True, False]]))
    tensor([[0.3466, 0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs)
    p = zero_outside(log_probs.detach(), response_mask).exp()
    return reinforce(log_probs, p, response_mask, cu_seqlens)


@token_wise
def chord_phi(
    log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
) -> PerToken:
    """CHORD-φ, Zhang et al. 2025 (arXiv:2508.11408): loss = −p (1 − p) log π with p = π as a constant.

    The weight is small for tokens that the policy knows already, which saves its entropy, and for tokens that it does
    not know at all, which would disrupt it; it is largest, 1/4, at p = 1/2.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        response_mask: bool, like log_probs: the tokens to imitate.
        cu_seqlens: int (B+1,) if packed; not read.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> chord_phi(torch.tensor([[0.5, 0.1]]).log(), torch.tensor([[True, False]]))
    tensor([[0.1733, 0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs)
    p = zero_outside(log_probs.detach(), response_mask).exp()
    return reinforce(log_probs, p * (1 - p), response_mask, cu_seqlens)


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
    """LUFFY, Yan et al. 2025 (arXiv:2504.14945): expert responses among the policy's own, as rows of the group.

    On the expert's tokens loss = −A f(π) with f(x) = x / (x + γ), and no clip: the expert's own probability is taken
    for 1, and the slope of f, γ / (x + γ)², is largest for tokens that the policy finds unlikely. On its own tokens it
    is :func:`clipped_surrogate`. Both are in one mean, whose denominator counts both.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        old_log_probs: float, like log_probs: policy at the start of the step; not read on the expert's tokens.
        advantages: float, like log_probs: the expert's score is in its group's baseline.
        expert_mask: bool, like log_probs: which of the response's tokens an expert wrote.
        response_mask: bool, like log_probs: the policy's tokens and the expert's.
        cu_seqlens: int (B+1,) if packed; not read.
        gamma: γ > 0, the probability at which f is 1/2.
        clip_low, clip_high: ε below and above 1, of the policy's own tokens.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; gamma not above 0; clip_low outside [0, 1] or clip_high < 0.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> log_probs, expert = torch.tensor([[0.4, 0.4]]).log(), torch.tensor([[True, False]])
    >>> luffy(log_probs, log_probs, torch.ones(1, 2), expert, m)
    tensor([[-0.8000, -1.0000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, advantages=advantages, expert_mask=expert_mask)
    if gamma <= 0:
        raise ValueError(f"gamma={gamma}, expected a number above 0: the probability at which f is 1/2")
    own, expert = response_mask & ~expert_mask, response_mask & expert_mask
    surrogate = clipped_surrogate(
        log_probs, old_log_probs, advantages, own, cu_seqlens, clip_low=clip_low, clip_high=clip_high
    )
    # x / (x + γ) = σ(log x − log γ), which no log-prob overflows
    f = (zero_outside(log_probs, expert) - math.log(gamma)).sigmoid()
    return torch.where(expert, -zero_outside(advantages, expert).detach() * f, surrogate)


@token_wise
def entropy(
    entropies: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
) -> PerToken:
    """Entropy bonus as a loss, Williams & Peng 1991: loss = −H(π(· | s_t)), so that minimizing it explores.

    Args:
        entropies: float (B, T) or (N,), in nats; the only gradient. See ``logprobs.entropy_from_logits``.
        response_mask: bool, like entropies.
        cu_seqlens: int (B+1,) if packed; not read.

    Returns:
        float, like entropies; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> entropy(torch.tensor([[0.7, 0.3]]), torch.tensor([[True, False]]))
    tensor([[-0.7000, -0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, entropies=entropies)
    return -zero_outside(entropies, response_mask)
