"""See :func:`cispo`."""

from functools import partial

from rlprims.losses._with_slope import limited_log_ratio, with_slope
from rlprims.masking import check_tokens, upcast
from rlprims.types import CuSeqlens, PerToken, TokenMask


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

    The bounds are the weight's own, not distances from 1. TRL's ``epsilon_high`` is ``w_max`` and, at its default of
    0.2, makes every weight 0.2; verl, slime and NeMo-RL mean ``w_min=1 - eps, w_max=1 + eps``; SkyRL's 0 and 5 are
    these. The paper tunes only the upper one. torchrl's loss of this name has the clipped ratio without the constant
    and without log_probs, so a clipped token gets no gradient, which is the opposite.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        old_log_probs: float, like log_probs: policy at the start of the step.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        w_min, w_max: least and largest weight; 1 lies between them, so that it is 1 on policy.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; w_min outside [0, 1] or w_max < 1.

    >>> import torch
    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> cispo(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -9.0]]), torch.ones(1, 2), m)
    tensor([[1., 5.]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    if not 0 <= w_min <= 1 or w_max < 1:
        raise ValueError(
            f"w_min={w_min} must be in [0, 1] and w_max={w_max} at least 1: they bound the weight itself, "
            "which is 1 on policy (for a distance eps pass 1 - eps and 1 + eps)"
        )
    rule = partial(_weighted, w_min=w_min, w_max=w_max)
    return with_slope(rule, response_mask, log_probs, old_log_probs, advantages)


def _weighted(
    log_probs: PerToken, old_log_probs: PerToken, advantages: PerToken, *, w_min: float, w_max: float
) -> tuple[PerToken, PerToken]:
    near, _ = limited_log_ratio(log_probs, old_log_probs)
    slope = near.exp_().clamp_(w_min, w_max).mul(upcast(advantages)).neg_()
    return slope * log_probs, slope
