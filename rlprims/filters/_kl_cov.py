"""See :func:`kl_cov`."""

from rlprims.filters._covariance import token_covariance
from rlprims.filters._largest import largest, share
from rlprims.masking import check_tokens
from rlprims.types import CuSeqlens, PerToken, TokenMask


def kl_cov(
    log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    fraction: float = 2e-4,
) -> TokenMask:
    """Choose the tokens that KL-Cov holds back, Cui et al. 2025 (arXiv:2505.22617): those of the largest covariance.

    The covariance of a token is (log π − mean log π)(A − mean A). It is large where a likely token is praised or an
    unlikely one blamed, which is what makes the policy certain. Add a KL penalty there, and there alone::

        chosen = kl_cov(log_probs, advantages, response_mask)
        penalties = kl_coef * kl(log_probs, old_log_probs, response_mask, value="abs")
        losses = losses + torch.where(chosen, penalties, 0.0)

    Means and order are the whole step's: call this once, before the batch is split. verl and SkyRL take those of a
    micro-batch, in which one token is penalized however few there are.

    Args:
        log_probs: float (B, T) or (N,), the policy before the update; a constant here.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; the means do not need it.
        fraction: the share of the tokens to choose, above 0 and at most 1; the paper has 2e-3 (7B) and 2e-4 (32B).

    Returns:
        bool, like log_probs: True where chosen, at least once if any token is valid, and on all that tie with the last;
        False outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; a fraction outside (0, 1].

    >>> import torch
    >>> m = torch.ones(1, 4, dtype=torch.bool)
    >>> kl_cov(torch.tensor([[-0.1, -3.0, -0.1, -3.0]]), torch.tensor([[2.0, 1.0, -1.0, -1.0]]), m).tolist()
    [[True, False, False, False]]
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, advantages=advantages)
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must be above 0 and at most 1: the share of the tokens to choose")
    covariance = token_covariance(log_probs, advantages, response_mask)
    return largest(covariance, response_mask, share(response_mask, fraction).clamp(min=1))
