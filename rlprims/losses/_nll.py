"""See :func:`nll`."""

from rlprims.masking import check_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask


def nll(
    log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
) -> PerToken:
    """Negative log-likelihood, the loss of supervised fine-tuning: loss = −log π.

    It is :func:`reinforce` with A = 1. On the correct responses alone it is the imitation term of VAPO (Yue et al.
    2025, arXiv:2504.05118): pass a mask that is True on those alone, to this and to the aggregation, whose mean is then
    over their tokens.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        response_mask: bool, like log_probs: the tokens to imitate.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.

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
