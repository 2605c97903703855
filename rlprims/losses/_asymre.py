"""See :func:`asymre`."""

from rlprims.losses._reinforce import reinforce
from rlprims.masking import upcast
from rlprims.types import CuSeqlens, PerToken, TokenMask


def asymre(
    log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    shift: float = -0.1,
) -> PerToken:
    """Asymmetric REINFORCE, Arnal et al. 2025 (arXiv:2506.20520): a baseline shifted down, for stale responses.

    loss = −(A − shift) log π. No importance ratio: on data of another policy, a baseline below its mean reward (a
    negative shift) makes good responses count for more than bad ones, which keeps training from collapsing; above it,
    the reverse. On policy the shift changes the variance only, and the gradient of the mean not at all.

    Pass advantages that are not divided by a standard deviation: the shift is in units of the reward.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        advantages: float, like log_probs: reward less the mean of its group.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        shift: what is added to the baseline, the paper's δV.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> asymre(torch.tensor([[-1.0, -1.0]]), torch.tensor([[0.5, -0.5]]), torch.ones(1, 2, dtype=torch.bool))
    tensor([[ 0.6000, -0.4000]])
    """
    return reinforce(log_probs, upcast(advantages) - shift, response_mask, cu_seqlens)
