"""Primitives that read other data than their own: a reference that is the old policy, tokens of correct responses."""

from rlprims import losses
from rlprims.layout import expand_to_tokens
from rlprims.ratios import Estimator
from rlprims.types import CuSeqlens, PerSequence, PerToken, TokenMask, token_wise


@token_wise
def kl_to_old(
    log_probs: PerToken,
    old_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    value: Estimator = "abs",
    gradient: Estimator | None = None,
) -> PerToken:
    """:func:`rlprims.losses.kl` to the policy at the start of the step, instead of to the reference.

    >>> import torch
    >>> kl_to_old(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]), torch.ones(1, 2, dtype=torch.bool))
    tensor([[0.5000, 1.0000]])
    """
    return losses.kl(log_probs, old_log_probs, response_mask, cu_seqlens, value=value, gradient=gradient)


@token_wise
def kl_to_sampler(
    log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    value: Estimator = "k2",
    gradient: Estimator | None = None,
) -> PerToken:
    """:func:`rlprims.losses.kl` to the policy that sampled the token (its own log-probs) instead of to the reference.

    prime-rl's τ log²ρ beside a masked policy loss, on the tokens that the mask leaves out too, is this with k2 and a
    coefficient of 2 τ: k2 is half the square. It holds the policy to its samples, whatever corrected them.

    >>> import torch
    >>> kl_to_sampler(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]), torch.ones(1, 2, dtype=torch.bool))
    tensor([[0.1250, 0.5000]])
    """
    return losses.kl(log_probs, rollout_log_probs, response_mask, cu_seqlens, value=value, gradient=gradient)


def is_correct(
    scores: PerSequence, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, *, threshold: float = 0.0
) -> TokenMask:
    """The tokens of the responses whose score is above ``threshold``, for the ``tokens`` of a :class:`LossTerm`.

    >>> import torch
    >>> is_correct(torch.tensor([1.0, 0.0]), torch.tensor([[True, False], [True, True]])).tolist()
    [[True, False], [False, False]]
    """
    return response_mask & expand_to_tokens(scores > threshold, response_mask, cu_seqlens)
