"""FIPO: weights from how much the policy has changed on the later tokens."""

from rlprims import scan
from rlprims._described import described
from rlprims.corrections._weights import Weights
from rlprims.masking import check_tokens, zero_outside
from rlprims.ratios import clamp_log_ratio, log_ratio
from rlprims.types import CuSeqlens, PerToken, TokenMask


@described
def fipo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    half_life: float = 32.0,
    w_min: float = 1.0,
    w_max: float = 1.2,
    max_ratio: float = 10.0,
    safe_ratio: float = 4.0,
) -> Weights:
    """Future-KL influence, Ma et al. 2026 (arXiv:2603.19835): larger weights before reinforced tokens.

    With d_t = log π_t − log π_old,t and ρ = exp(d), F_t = Σ_{k≥t} γ^{k−t} d_k over the valid tokens of the response
    with ρ_k <= ``max_ratio``, γ = 2^(−1/τ), and f_t = clip(exp(F_t), w_min, w_max). If A_t < 0 and ρ_t >
    ``safe_ratio``, f_t is at most 1, so that bad tokens whose probability has grown a lot get no larger weight. The
    weights multiply the policy loss, f_t · loss_t. As f is a constant and at least 0, this is the same as multiplying
    the advantage.

    At the first update of a batch π is π_old and every weight is 1, so nothing changes in an algorithm with one update
    per batch.

    k − t counts valid tokens, so tool output between two turns is not counted. ms-swift counts columns. ``w_min=1`` and
    ``max_ratio=10`` are from the authors' script for 32B; ``w_min=0.8`` is the symmetric form.

    Args:
        log_probs: of the policy before this update; it gets no gradient here.
        advantages: only the sign is used.
        half_life: τ, in valid tokens: the weight of d_k halves every τ tokens; above 0.
        w_min, w_max: bounds of a weight; 0 <= w_min <= 1 <= w_max.
        max_ratio: δ > 0: tokens with a larger ratio are left out of F.
        safe_ratio: the largest ratio at which a token with a negative advantage may have a weight above 1; above 0.

    Returns:
        Weights between w_min and w_max, 0 outside the mask; ``corrected`` is empty.

    >>> import torch
    >>> m, old = torch.tensor([[True, False, True]]), torch.zeros(1, 3)
    >>> log_probs = torch.tensor([[0.0, 9.0, 0.2]])  # F is 0.1 and 0.2, because the tool's token is not counted
    >>> fipo(log_probs, old, torch.ones(1, 3), m, half_life=1.0).values
    tensor([[1.1052, 0.0000, 1.2000]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    if not 0 <= w_min <= 1 <= w_max:
        raise ValueError(f"w_min={w_min} and w_max={w_max}, expected 0 <= w_min <= 1 <= w_max: on policy w is 1")
    if not (half_life > 0 and max_ratio > 0 and safe_ratio > 0):
        raise ValueError(
            f"half_life={half_life}, max_ratio={max_ratio} and safe_ratio={safe_ratio}, expected numbers above 0"
        )
    d = log_ratio(log_probs.detach(), old_log_probs, response_mask)
    ratio = d.exp()
    counted = d.masked_fill(ratio > max_ratio, 0.0)
    future = scan.discounted_sum(counted, 2 ** (-1 / half_life), response_mask, cu_seqlens)
    weights = clamp_log_ratio(future).exp().clamp(w_min, w_max)
    unsafe = (zero_outside(advantages, response_mask) < 0) & (ratio > safe_ratio)
    return Weights(zero_outside(weights.clamp(max=1.0).where(unsafe, weights), response_mask))
