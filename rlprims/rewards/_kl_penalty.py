"""See :func:`kl_penalty`."""

from rlprims.masking import check_tokens, zero_outside
from rlprims.ratios import Estimator, estimate_kl
from rlprims.types import CuSeqlens, PerToken, TokenMask


def kl_penalty(
    rewards: PerToken,
    old_log_probs: PerToken,
    ref_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    kl_coef: float,
    estimator: Estimator = "k1",
) -> PerToken:
    """KL in the reward, Stiennon et al. 2020 (arXiv:2009.01325), section 3.4: r_t − β KL_t.

    The distance is measured at the policy that sampled, so it is a reward and no gradient flows; with k1 its policy
    gradient is that of KL(π ‖ π_ref). ``controllers`` adapt β.

    Args:
        rewards: float (B, T) or (N,), per token.
        old_log_probs, ref_log_probs: float, like rewards.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        kl_coef: β, reward per nat.
        estimator: "k1", "k2", "k3" or "abs" of :func:`rlprims.divergence.estimate_kl`.

    Returns:
        float, like rewards; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; an unknown estimator.

    >>> import torch
    >>> m = torch.tensor([[True, True]])
    >>> rewards, old, ref = torch.tensor([[[0.0, 1.0]], [[-1.0, -1.0]], [[-1.5, -1.0]]])
    >>> kl_penalty(rewards, old, ref, m, kl_coef=0.1)
    tensor([[-0.0500,  1.0000]])
    """
    check_tokens(response_mask, cu_seqlens, rewards=rewards, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    distance = zero_outside(old_log_probs, response_mask) - zero_outside(ref_log_probs, response_mask)
    return zero_outside(rewards, response_mask) - kl_coef * estimate_kl(distance, estimator).detach()
