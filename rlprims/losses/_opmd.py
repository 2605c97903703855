"""See :func:`opmd`."""

from typing import Literal

from rlprims.layout import lengths_of_tokens
from rlprims.masking import check_tokens, zero_outside
from rlprims.ratios import summed_log_ratio
from rlprims.types import CuSeqlens, PerToken, TokenMask


def opmd(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    tau: float = 0.1,
    level: Literal["sequence", "token"] = "sequence",
) -> PerToken:
    """Online policy mirror descent, Kimi k1.5 2025 (arXiv:2501.12599), section 2.3: REINFORCE and a squared log-ratio.

    With d_t = log_probs − old_log_probs and D = Σ_t d_t of a response of n tokens:
    loss_t = −A_t log_probs_t + τ/2 D² / n, which sums to the paper's −A log π + τ/2 (log π/π_old)² over a response, so
    aggregate with ``seq_mean_token_sum``. No ratio, no clip: what pulls the policy back is linear in the distance.

    ``level="token"`` has τ/2 d_t² in place of the second term. That is DRO's loss (Richemond et al. 2024,
    arXiv:2405.19107) as verl and tinker have it per token, with τ as its β and without the value function of the
    paper; ROLL's Kimi loss is also per token. The Kimi paper gives no τ; ROLL starts from 0.1.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        old_log_probs: float, like log_probs: what the policy is held to, in the paper that of the iteration's start.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed.
        tau: τ > 0, in units of the advantage per nat.
        level: what is squared: the log-ratio of the "sequence", or of each "token".

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; an unknown level; tau not above 0.

    >>> import torch
    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> opmd(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, -3.0]]), torch.ones(1, 2), m, tau=1.0)
    tensor([[2., 3.]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    if tau <= 0:
        raise ValueError(f"tau={tau} must be above 0; without the regularizer it is losses.reinforce")
    x = zero_outside(log_probs, response_mask)
    if level == "sequence":
        total = summed_log_ratio(log_probs, old_log_probs, response_mask, cu_seqlens)
        squared = total.square() / lengths_of_tokens(response_mask, cu_seqlens)
    elif level == "token":
        squared = (x - zero_outside(old_log_probs, response_mask).detach()).square()
    else:
        raise ValueError(f"unknown level {level!r}: choose 'sequence' or 'token'")
    return tau / 2 * squared - zero_outside(advantages, response_mask).detach() * x
