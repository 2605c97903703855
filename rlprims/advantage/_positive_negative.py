"""See :func:`positive_negative`."""

import torch

from rlprims.masking import check_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask


def positive_negative(
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    positive: float = 0.1,
    negative: float = 1.0,
) -> PerToken:
    """Advantages weighed by their sign: W-REINFORCE, Zhu et al. 2025 (arXiv:2506.01347).

    positive · A where A > 0, negative · A elsewhere. The paper's weighted REINFORCE has λ = 0.1 on right answers and 1
    on wrong ones; ``positive=0`` is its negative-sample reinforcement (NSR), ``negative=0`` the positive one (PSR). Its
    advantages are rewards of ±1 without a baseline; after one, "positive" means better than the baseline.

    Args:
        advantages: float (B, T) or (N,).
        response_mask: bool, like advantages.
        cu_seqlens: int (B+1,) if packed; not needed.
        positive, negative: the weights.

    Returns:
        float, like advantages; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> positive_negative(torch.tensor([[2.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool))
    tensor([[ 0.2000, -2.0000]])
    """
    check_tokens(response_mask, cu_seqlens, advantages=advantages)
    a = zero_outside(advantages, response_mask)
    return torch.where(a > 0, positive * a, negative * a)
