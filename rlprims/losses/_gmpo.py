"""See :func:`gmpo`."""

from functools import partial

from rlprims.layout import expand_to_tokens, sequence_lengths, sequence_sum
from rlprims.losses._with_slope import minus_weighted, with_slope
from rlprims.masking import check_tokens, negative, positive, upcast
from rlprims.ratios import LOG_RATIO_LIMIT
from rlprims.types import CuSeqlens, PerToken, TokenMask


def gmpo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> PerToken:
    """Geometric-mean policy optimization, Zhao et al. 2025 (arXiv:2507.20673): clip each token, then average.

    With d_t = log_probs − old_log_probs, held at clip_high where A_t > 0 and at −clip_low where A_t < 0 (PPO's side of
    the clip, on the log-ratio), and ρ = exp(mean of d over the response's tokens): loss_t = −ρ A_t. Under
    ``seq_mean_token_mean`` that is the paper's −ρ A per response. :func:`gspo` averages first and clips the mean.

    The bounds are of the log-ratio: 0.4 lets a ratio range over [0.67, 1.49]. The gradient goes through the mean to
    every token that is not clipped. verl always takes the mean over all rows, empty ones too, whatever it is asked.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        old_log_probs: float, like log_probs: policy at the start of the step.
        advantages: float, like log_probs; in the paper equal on all tokens of a response.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed.
        clip_low, clip_high: bounds below and above 0, of the log-ratio.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; clip_low or clip_high below 0.

    >>> import torch
    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> gmpo(torch.tensor([[0.6, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2), m)
    tensor([[-1.2214, -1.2214]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low} and clip_high={clip_high} must be at least 0: they bound the log-ratio")
    held = with_slope(
        partial(_held, clip_low=clip_low, clip_high=clip_high), response_mask, log_probs, old_log_probs, advantages
    )
    total = sequence_sum(held, response_mask, cu_seqlens)
    mean = total / sequence_lengths(response_mask, cu_seqlens).clamp(min=1)
    ratio = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return minus_weighted(expand_to_tokens(ratio, response_mask, cu_seqlens), advantages, response_mask)


def _held(
    log_probs: PerToken, old_log_probs: PerToken, advantages: PerToken, *, clip_low: float, clip_high: float
) -> tuple[PerToken, PerToken]:
    """d within (−∞, clip_high) where A > 0, (−clip_low, ∞) where A < 0, at 0 where A = 0; and 1 where it is free."""
    d = upcast(log_probs) - upcast(old_log_probs)
    good, bad = positive(advantages, d.dtype), negative(advantages, d.dtype)
    low = (bad * -min(clip_low, _FAR)).sub_(good, alpha=_FAR)
    high = (good * min(clip_high, _FAR)).add_(bad, alpha=_FAR)
    held = d.clamp(low, high)
    return held, d.eq_(held).mul_(good.add_(bad))


_FAR = 1e30  # as a bound it is none, and times 0 it is 0, which inf is not
