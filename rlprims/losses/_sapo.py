"""See :func:`sapo`."""

from functools import partial

import torch

from rlprims.losses._with_slope import limited_log_ratio, with_slope
from rlprims.masking import check_tokens, positive, upcast
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
    rule = partial(_gated, tau_pos=tau_pos, tau_neg=tau_neg)
    return with_slope(rule, response_mask, log_probs, old_log_probs, advantages)


def _gated(
    log_probs: PerToken, old_log_probs: PerToken, advantages: PerToken, *, tau_pos: float, tau_neg: float
) -> tuple[PerToken, PerToken]:
    """The loss, and −4 σ(1 − σ) ρ A, where the limit of the log-ratio lets it move."""
    a = upcast(advantages)
    near, moves = limited_log_ratio(log_probs, old_log_probs)
    ratio = near.exp_()
    good = positive(a, ratio.dtype)
    tau = torch.lerp(torch.full_like(ratio, tau_neg), torch.full_like(ratio, tau_pos), good)
    gate = (ratio - 1).mul_(tau).sigmoid_()
    pull = (gate * -4).mul_(a)
    slope = moves.mul_(ratio).mul_(pull).mul_(1 - gate)
    return pull.div_(tau), slope
