"""See :func:`vespo`."""

import torch
from torch import Tensor

from rlprims.losses._with_slope import minus_weighted
from rlprims.masking import check_tokens, zero_outside
from rlprims.ratios import sequence_log_ratio
from rlprims.types import CuSeqlens, PerToken, TokenMask


def vespo(
    log_probs: PerToken,
    rollout_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> PerToken:
    """Variational sequence-level soft policy optimization, Shen et al. 2026 (arXiv:2602.10693): a soft kernel of w.

    With w = exp(Σ_t log_probs − rollout_log_probs), the product of the response's ratios, and the constant
    φ(w) = w^k exp(λ (1 − w)): loss = −φ(w) A log_probs. φ is 1 on policy, has its maximum at w = k / λ and goes to 0 on
    both sides, faster above for a larger λ; (k, λ) are the pos or neg ones by the sign of A, and neg at A = 0.

    There is no division by the length, so a long response leaves the kernel's support with a small drift per token.
    TRL, whose defaults these are, has the ratio to its old policy and adds the sampler's weights, truncated or masked
    as they may be; the ratio to the sampler is the one without bounds. It takes the token mean.

    Args:
        log_probs: float (B, T) or (N,), current policy; the only gradient.
        rollout_log_probs: float, like log_probs: the policy that sampled.
        advantages: float, like log_probs.
        response_mask: bool, like log_probs.
        cu_seqlens: int (B+1,) if packed.
        k_pos, k_neg: power of w, at least 0.
        lambda_pos, lambda_neg: rate of the decay in w, at least 0.

    Returns:
        float, like log_probs; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; a hyperparameter below 0.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> vespo(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.0]]), torch.ones(1, 2), m)
    tensor([[0.3882, 0.3882]])
    """
    check_tokens(
        response_mask, cu_seqlens, log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages
    )
    if min(k_pos, lambda_pos, k_neg, lambda_neg) < 0:
        raise ValueError(f"{k_pos=}, {lambda_pos=}, {k_neg=} and {lambda_neg=} must be at least 0")
    a = zero_outside(advantages, response_mask).detach()
    log_w = sequence_log_ratio(log_probs.detach(), rollout_log_probs, response_mask, cu_seqlens, mean=False)
    kernel = torch.where(a > 0, _kernel(log_w, k_pos, lambda_pos), _kernel(log_w, k_neg, lambda_neg))
    return minus_weighted(log_probs, kernel * a, response_mask)


def _kernel(log_w: Tensor, k: float, rate: float) -> Tensor:
    return (k * log_w - rate * torch.expm1(log_w)).exp()
