"""See :func:`entropy`."""

from rlprims.masking import check_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask


def entropy(
    entropies: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
) -> PerToken:
    """Entropy bonus as a loss, Williams & Peng 1991: loss = −H(π(· | s_t)), so that minimizing it explores.

    Args:
        entropies: float (B, T) or (N,), in nats; the only gradient. See ``logprobs.entropy_from_logits``.
        response_mask: bool, like entropies.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.

    Returns:
        float, like entropies; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> entropy(torch.tensor([[0.7, 0.3]]), torch.tensor([[True, False]]))
    tensor([[-0.7000, -0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, entropies=entropies)
    return -zero_outside(entropies, response_mask)
