"""See :func:`high_entropy`."""

from rlprims.filters._largest import largest, share
from rlprims.masking import check_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask


def high_entropy(
    entropies: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, *, fraction: float = 0.2
) -> TokenMask:
    """Keep the tokens where the policy was least certain: beyond the 80/20 rule, Wang et al. 2025 (arXiv:2506.01939).

    Kept are entropies of at least the (1 − fraction)-quantile of all valid tokens, so that a fifth of the tokens, the
    forks of the reasoning, gets the whole policy gradient. Ties with the last one are kept.

    The quantile is the whole step's: call this once, before the batch is split. TRL and ms-swift take that of a
    micro-batch, which makes the loss depend on the split.

    Args:
        entropies: float (B, T) or (N,): of the policy at each token, in nats.
        response_mask: bool, like entropies.
        cu_seqlens: int (B+1,) if packed; the quantile does not need it.
        fraction: the share of the tokens to keep, above 0 and at most 1.

    Returns:
        bool, like entropies: True where kept, at least once if any token is valid; False outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; a fraction outside (0, 1].

    >>> import torch
    >>> m = torch.tensor([[True] * 5 + [False]])
    >>> high_entropy(torch.tensor([[0.1, 2.0, 0.3, 0.2, 0.0, 9.0]]), m, fraction=0.4).tolist()
    [[False, True, True, False, False, False]]
    """
    check_tokens(response_mask, cu_seqlens, entropies=entropies)
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must be above 0 and at most 1: the share of the tokens to keep")
    # The quantile lies between two tokens, n − 1 steps apart from first to last; those at or above it:
    count = share(response_mask, fraction, less=1) + 1
    return largest(zero_outside(entropies, response_mask), response_mask, count.clamp(min=1))
