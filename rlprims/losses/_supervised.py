"""Losses that ask for no advantages: the negative log-likelihood, and the entropy bonus."""

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
    is over their tokens.

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
