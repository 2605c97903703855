"""See :func:`clip`."""

from rlprims.masking import check_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask


def clip(
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    low: float,
    high: float,
) -> PerToken:
    """Advantages cut to [low, high], for after a normalization: one response in a million cannot carry the step.

    NeMo-RL's ``advantage_clip_low`` and ``_high``; ROLL's ``advantage_clip`` is ±c. It is a bias, and one-sided bounds
    move the mean as well.

    Args:
        advantages: float (B, T) or (N,).
        response_mask: bool, like advantages.
        cu_seqlens: int (B+1,) if packed; not needed.
        low, high: bounds, in units of the advantage; ``-inf`` or ``inf`` for none.

    Returns:
        float, like advantages; 0 outside the mask, whatever the bounds.

    Raises:
        ValueError: shapes or dtypes that do not fit; low above high.

    >>> import torch
    >>> clip(torch.tensor([[-9.0, 0.5, 9.0]]), torch.ones(1, 3, dtype=torch.bool), low=-5.0, high=2.0)
    tensor([[-5.0000,  0.5000,  2.0000]])
    """
    if not low <= high:
        raise ValueError(f"low is {low} and high {high}: low must not be above high")
    check_tokens(response_mask, cu_seqlens, advantages=advantages)
    return zero_outside(zero_outside(advantages, response_mask).clamp(low, high), response_mask)
