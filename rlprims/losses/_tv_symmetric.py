"""See :func:`tv_symmetric`."""

from functools import partial

import torch
from torch import Tensor

from rlprims.losses._with_slope import limited_log_ratio, with_slope
from rlprims.masking import check_tokens, upcast
from rlprims.types import CuSeqlens, PerToken, TokenMask


def tv_symmetric(
    log_probs: PerToken,
    rollout_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    threshold: float = 0.1,
) -> PerToken:
    """The ratio's policy gradient on the tokens whose probability has moved by at most ``threshold``, either way.

    With p = exp(log_probs), q = exp(rollout_log_probs) and ρ = p / q: loss = −M ρ A, with M = 1 where
    |p − q| <= threshold, else 0. prime-rl has it under the name IPO, which is no preference loss; it adds
    0.001 (log ρ)², which is ``kl`` to the sampler with k2 at twice that coefficient.

    Unlike :func:`dppo` it asks not where the advantage pushes: a token that has left does not come back by itself. That
    makes it a filter of tokens on which sampler and trainer disagree, whatever their sign.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        rollout_log_probs: float, like log_probs: the sampler's own.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        threshold: at least 0, a difference of probabilities.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; threshold < 0.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> now, then = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.2]]).log()
    >>> tv_symmetric(now, then, torch.tensor([[-1.0, -1.0]]), m)
    tensor([[0.0000, 1.2500]])
    """
    check_tokens(
        response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages
    )
    if threshold < 0:
        raise ValueError(f"threshold={threshold} must be at least 0, a difference of probabilities")
    rule = partial(_near, threshold=threshold)
    return with_slope(rule, response_mask, log_probs, rollout_log_probs, advantages)


def _near(
    log_probs: PerToken, rollout_log_probs: PerToken, advantages: PerToken, *, threshold: float
) -> tuple[PerToken, Tensor]:
    near, moves = limited_log_ratio(log_probs, rollout_log_probs)
    stays = (upcast(log_probs).exp() - upcast(rollout_log_probs).exp()).abs() <= threshold
    return -torch.where(stays, near.exp_(), 0.0) * upcast(advantages), moves.bool()
