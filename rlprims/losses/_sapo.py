"""See :func:`sapo`."""

import torch

from rlprims.masking import check_tokens, log_ratio, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask


def sapo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PerToken:
    """Soft adaptive policy optimization, Gao et al. 2025 (arXiv:2511.20347): a sigmoid gate, not a clip.

    With ρ = exp(log_probs − old_log_probs), and τ = tau_pos where A > 0, else tau_neg:
    loss = −(4 / τ) σ(τ (ρ − 1)) A. The 4 / τ makes the slope 1 at ρ = 1, so that on policy the gradient is
    REINFORCE's; away from it the gradient fades without ever being cut. The loss on policy is −2 A / τ, not −A.

    Aggregate with ``seq_mean_token_mean``, as the paper does; verl always does, AReaL takes the token mean.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        old_log_probs: float, like log_probs: policy at the start of the step.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        tau_pos, tau_neg: steepness of the gate where A > 0, and elsewhere; larger trusts less.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; tau_pos or tau_neg not above 0.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> sapo(torch.tensor([[0.0, 0.5]]), torch.zeros(1, 2), torch.ones(1, 2), m)
    tensor([[-2.0000, -2.6269]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos={tau_pos} and tau_neg={tau_neg} must be above 0")
    a = zero_outside(advantages, response_mask).detach()
    ratio = log_ratio(log_probs, old_log_probs, response_mask).exp()
    gate = torch.where(a > 0, _gate(ratio, tau_pos), _gate(ratio, tau_neg))
    return -gate * a


def _gate(ratio: PerToken, tau: float) -> PerToken:
    return torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
