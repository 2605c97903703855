"""See :func:`policy_update` and :func:`divergences`."""

import torch

from rlprims.diagnostics._tokens import token_max, token_mean
from rlprims.divergence import estimate_kl
from rlprims.masking import log_ratio, zero_outside
from rlprims.types import Mean, Metrics, PerToken, TokenMask


def policy_update(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> Metrics:
    """How far the policy has moved within the step.

    ``approx_kl``: k3 of KL(π_old ‖ π) from samples of π_old; ``ratio_max``; with bounds given, the shares of tokens
    whose ratio is outside them, by side and by sign of the advantage. ``clip_fraction_low`` (below, A < 0) and
    ``clip_fraction_high`` (above, A > 0) get no gradient; ``outside_fraction_low`` (below, A > 0) and
    ``outside_fraction_high`` (above, A < 0) keep theirs, which leads back.

    >>> m = torch.tensor([[True, True]])
    >>> new, old, a = torch.tensor([[0.5, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2)
    >>> metrics = policy_update(new, old, a, m, clip_low=0.2, clip_high=0.2)
    >>> metrics["clip_fraction_high"].value()
    tensor(0.5000)
    """
    with torch.no_grad():
        moved = log_ratio(log_probs, old_log_probs, response_mask)
        ratio = moved.exp()
        metrics: Metrics = {
            "approx_kl": token_mean(estimate_kl(-moved, "k3"), response_mask),
            "ratio_max": token_max(ratio, response_mask),
        }
        if clip_low is not None and clip_high is not None:
            a, tokens = zero_outside(advantages, response_mask), response_mask.sum()
            below, above = ratio < 1 - clip_low, ratio > 1 + clip_high
            metrics["clip_fraction_low"] = Mean((below & (a < 0)).sum(), tokens)
            metrics["clip_fraction_high"] = Mean((above & (a > 0)).sum(), tokens)
            metrics["outside_fraction_low"] = Mean((below & (a > 0)).sum(), tokens)
            metrics["outside_fraction_high"] = Mean((above & (a < 0)).sum(), tokens)
        return metrics


def divergences(log_probs: PerToken, ref_log_probs: PerToken, response_mask: TokenMask) -> Metrics:
    """KL(π ‖ π_ref) per token from samples of π: ``kl_k1`` (unbiased, noisy), ``kl_k2``, ``kl_k3`` (unbiased, >= 0).

    k1 below 0 with k3 above it says that the samples are not π's. See :func:`rlprims.divergence.estimate_kl`.

    >>> metrics = divergences(torch.tensor([[0.0]]), torch.tensor([[-1.0]]), torch.tensor([[True]]))
    >>> [round(float(kl.value()), 4) for kl in metrics.values()]
    [1.0, 0.5, 0.3679]
    """
    with torch.no_grad():
        d = zero_outside(log_probs, response_mask) - zero_outside(ref_log_probs, response_mask)
        return {
            "kl_k1": token_mean(estimate_kl(d, "k1"), response_mask),
            "kl_k2": token_mean(estimate_kl(d, "k2"), response_mask),
            "kl_k3": token_mean(estimate_kl(d, "k3"), response_mask),
        }
