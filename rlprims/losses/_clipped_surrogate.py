"""See :func:`clipped_surrogate`."""

import math
from functools import partial, reduce

import torch
from torch import Tensor

from rlprims import kernels
from rlprims.losses._bounds import check_ratio_bounds
from rlprims.losses._with_slope import with_slope
from rlprims.masking import check_tokens, empty_like, negative, upcast
from rlprims.ratios import LOG_RATIO_LIMIT
from rlprims.types import CuSeqlens, PerToken, TokenMask


def clipped_surrogate(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PerToken:
    """PPO's clipped surrogate, Schulman et al. 2017 (arXiv:1707.06347), eq. 7, with asymmetric bounds.

    With ρ = exp(log_probs − old_log_probs): loss = −min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A).
    DAPO's clip-higher (arXiv:2503.14476, eq. 10) is ``clip_high=0.28``. ``dual_clip=c`` bounds the loss of tokens with
    A < 0 from above by c |A| (Ye et al. 2020, arXiv:1912.09729, eq. 5); verl always applies c = 3, TRL and NeMo-RL do
    not by default. The two-sided clip of INTELLECT-2 (arXiv:2505.07291; TRL's ``delta``) is ``dual_clip`` at c = δ.
    Exactly on a bound the unclipped gradient passes.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        old_log_probs: float, like log_probs: policy at the start of the step.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        clip_low, clip_high: ε below and above 1, of the ratio.
        dual_clip: c > 1, or None for no dual clip.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; clip_low outside [0, 1], clip_high < 0, or dual_clip <= 1.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> clipped_surrogate(torch.tensor([[0.5, 0.5]]), torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), m)
    tensor([[-1.2000,  1.6487]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_ratio_bounds(clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} must be above 1 (3.0 is usual), or None for no dual clip")
    rule = partial(clipped, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    whole = None
    if kernels.chosen("clipped", log_probs):
        from rlprims.kernels._clipped import clipped as kernel

        whole = partial(kernel, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return with_slope(rule, response_mask, log_probs, old_log_probs, advantages, whole=whole)


def clipped(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[PerToken, Tensor]:
    """The loss, and where it is its own slope: where neither a clip nor the limit of the log-ratio holds.

    max and min of products are, by the sign of A, two clamps of the ratio; the limit is one more bound of them.
    """
    least, most = math.exp(-LOG_RATIO_LIMIT), math.exp(LOG_RATIO_LIMIT)
    now, then, gain = upcast(log_probs), upcast(old_log_probs), upcast(advantages)
    dtype = reduce(torch.promote_types, (now.dtype, then.dtype, gain.dtype))
    ratio = torch.sub(now, then, out=empty_like(now, dtype)).exp_()
    held, of_bad = empty_like(now, dtype), empty_like(now, dtype)
    torch.clamp(ratio, least, min(1 + clip_high, most), out=held)
    torch.clamp(ratio, max(1 - clip_low, least), min(most if dual_clip is None else dual_clip, most), out=of_bad)
    held.lerp_(of_bad, negative(gain, dtype))  # one or the other, to the bit
    free = ratio == held if torch.compiler.is_compiling() else ratio.eq_(held).bool()
    return held.mul_(gain).neg_(), free
