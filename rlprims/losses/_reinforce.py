"""See :func:`reinforce`."""

from rlprims.losses._with_slope import minus_weighted
from rlprims.masking import check_tokens
from rlprims.types import CuSeqlens, PerToken, TokenMask


def reinforce(
    log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
) -> PerToken:
    """REINFORCE, Williams 1992, eq. 4: loss = −A log π, whose gradient is the policy gradient.

    With A = 1 it is the negative log-likelihood of supervised fine-tuning. GPG (Chu et al. 2025, arXiv:2504.02546) is
    this loss with advantages of its own.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> reinforce(torch.tensor([[-0.5, -9.0]]), torch.tensor([[2.0, 1.0]]), torch.tensor([[True, False]]))
    tensor([[1., 0.]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, advantages=advantages)
    return minus_weighted(log_probs, advantages, response_mask)
