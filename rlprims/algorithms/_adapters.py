"""Losses with the KL to the old policy or to the sampler, and the selection of tokens of solved responses."""

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

    prime-rl adds τ log²ρ to its policy loss, also on tokens that its mask drops: this loss with k2, coefficient 2 τ.

    >>> import torch
    >>> kl_to_sampler(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]), torch.ones(1, 2, dtype=torch.bool))
    tensor([[0.1250, 0.5000]])
    """
    return losses.kl(log_probs, rollout_log_probs, response_mask, cu_seqlens, value=value, gradient=gradient)


def is_correct(
    scores: PerSequence, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, *, threshold: float = 0.0
) -> TokenMask:
    """The tokens of the responses whose score is above ``threshold``, for ``tokens`` of a :class:`LossTerm`.

    >>> import torch
    >>> is_correct(torch.tensor([1.0, 0.0]), torch.tensor([[True, False], [True, True]])).tolist()
    [[True, False], [False, False]]
    """
    return response_mask & expand_to_tokens(scores > threshold, response_mask, cu_seqlens)
