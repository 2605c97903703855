"""See :func:`gspo` and :func:`gspo_token`."""

from typing import Literal

import torch
from torch import Tensor

from rlprims.losses._bounds import check_ratio_bounds
from rlprims.losses._clipped_surrogate import clipped
from rlprims.losses._with_slope import with_slope
from rlprims.masking import check_tokens, zero_outside
from rlprims.ratios import sequence_log_ratio
from rlprims.types import CuSeqlens, PerToken, TokenMask


def gspo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    mean: Literal["geometric", "product"] = "geometric",
) -> PerToken:
    """Group sequence policy optimization, Zheng et al. 2025 (arXiv:2507.18071), eq. 5: one ratio for each response.

    With s = exp(mean over the response's tokens of log_probs − old_log_probs), the geometric mean of the token ratios:
    loss_t = −min(s A_t, clip(s, 1 − clip_low, 1 + clip_high) A_t). The gradient goes through the mean to every token.

    Aggregate with ``seq_mean_token_mean``, as the paper does: under ``token_mean`` a response weighs by its length.
    ``seq_mean_token_sum`` instead is LUSPO (arXiv:2602.05261), which needs no loss of its own. The defaults are the
    paper's (section 5.1); verl, TRL, NeMo-RL and SkyRL start from the token ratio's 0.2, at which nothing is clipped.
    With ``mean="product"`` s is the likelihood ratio of the response, and the loss PPO's for a response that is one
    action: TRL's RLOO, with bounds of 0.2. It is exponential in length, so long responses are clipped first.
    The mean, or the sum, is clamped to ±20, the tokens' log-ratios are not.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        old_log_probs: float, like log_probs: policy at the start of the step.
        advantages: float, like log_probs; in the paper equal on all tokens of a response.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed.
        clip_low, clip_high: ε below and above 1, of the sequence ratio.
        mean: "geometric" or "product"; how the tokens' ratios become one.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; clip_low outside [0, 1] or clip_high < 0; an unknown mean.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> gspo(torch.tensor([[0.2, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2), m, clip_high=0.2)
    tensor([[-1.1052, -1.1052]])
    """
    _check(log_probs, old_log_probs, advantages, response_mask, cu_seqlens, clip_low, clip_high)
    if mean not in ("geometric", "product"):
        raise ValueError(f"unknown mean {mean!r}: choose 'geometric' or 'product'")
    averaged = mean == "geometric"
    log_s = sequence_log_ratio(log_probs, old_log_probs, response_mask, cu_seqlens, mean=averaged)
    return _clipped(log_s, advantages, response_mask, clip_low, clip_high)


def gspo_token(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PerToken:
    """GSPO-token, Zheng et al. 2025 (arXiv:2507.18071), section 4.3: :func:`gspo` with a gradient for each token.

    With s the sequence ratio of :func:`gspo` and s_t = sg(s) · exp(log_probs_t − sg(log_probs_t)), which equals s:
    loss_t = −min(s_t A_t, clip(s_t, 1 − clip_low, 1 + clip_high) A_t), and its gradient is −s A_t at token t alone,
    0 where clipped. Under ``seq_mean_token_mean`` the gradient is :func:`gspo`'s if A is the same on all tokens of a
    response, which it need not be here. verl, SkyRL and tunix implement this form under the name gspo.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        old_log_probs: float, like log_probs: policy at the start of the step.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed.
        clip_low, clip_high: ε below and above 1, of the sequence ratio.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; clip_low outside [0, 1] or clip_high < 0.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> gspo_token(torch.tensor([[0.2, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2), m, clip_high=0.2)
    tensor([[-1.1052, -1.1052]])
    """
    _check(log_probs, old_log_probs, advantages, response_mask, cu_seqlens, clip_low, clip_high)
    shared = sequence_log_ratio(log_probs.detach(), old_log_probs, response_mask, cu_seqlens, mean=True)
    kept = zero_outside(log_probs, response_mask)
    # −inf − (−inf) would be NaN; an impossible token has no gradient to give
    own = torch.where(kept == -torch.inf, 0.0, kept)
    return _clipped(shared + own - own.detach(), advantages, response_mask, clip_low, clip_high)


def _check(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor | None,
    clip_low: float,
    clip_high: float,
) -> None:
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_ratio_bounds(clip_low, clip_high)


def _clipped(log_s: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float) -> Tensor:
    def rule(log_s: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        return clipped(log_s, torch.zeros_like(log_s), advantages, clip_low=clip_low, clip_high=clip_high)

    return with_slope(rule, mask, log_s, advantages)
