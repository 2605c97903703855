"""What the tensors say of a step. Each mean is a sum with its count: ranks and micro-batches add up exactly."""

import torch
from torch import Tensor

from rlprims.divergence import estimate_kl
from rlprims.masking import log_ratio, sequence_lengths, zero_outside
from rlprims.types import CuSeqlens, Max, Mean, Metrics, PerSequence, PerToken, RowMask, TokenMask


def token_mean(x: PerToken, response_mask: TokenMask) -> Mean:
    """Mean over the valid tokens, as a metric.

    >>> token_mean(torch.tensor([[1.0, 9.0]]), torch.tensor([[True, False]])).value()
    tensor(1.)
    """
    return Mean(zero_outside(x, response_mask).sum().detach(), response_mask.sum())


def _max(x: Tensor) -> Max:
    return Max(x.amax() if x.numel() else x.new_zeros(()))


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

    ``approx_kl``: k3 of KL(π_old ‖ π) from samples of π_old; ``ratio_max``; with bounds given, ``clip_fraction_low``
    and ``clip_fraction_high``: the share of tokens whose gradient the clip removes, A < 0 below and A > 0 above.

    >>> m = torch.tensor([[True, True]])
    >>> new, old, a = torch.tensor([[0.5, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2)
    >>> metrics = policy_update(new, old, a, m, clip_low=0.2, clip_high=0.2)
    >>> metrics["clip_fraction_high"].value()
    tensor(0.5000)
    """
    with torch.no_grad():
        moved = log_ratio(log_probs, old_log_probs, response_mask)
        ratio = moved.exp()
        a = zero_outside(advantages, response_mask)
        metrics: Metrics = {
            "approx_kl": token_mean(estimate_kl(-moved, "k3"), response_mask),
            "ratio_max": _max(torch.where(response_mask, ratio, 0.0)),
        }
        if clip_low is not None and clip_high is not None:
            below = (ratio < 1 - clip_low) & (a < 0)
            above = (ratio > 1 + clip_high) & (a > 0)
            metrics["clip_fraction_low"] = token_mean(below.float(), response_mask)
            metrics["clip_fraction_high"] = token_mean(above.float(), response_mask)
        return metrics


def sampler_mismatch(old_log_probs: PerToken, rollout_log_probs: PerToken, response_mask: TokenMask) -> Metrics:
    """Trainer against sampler on the same tokens; at the first step of a run it should be rounding.

    ``mismatch_max``: largest |difference| in nats; ``mismatch_k3``: k3 of KL(sampler ‖ trainer).
    """
    with torch.no_grad():
        difference = log_ratio(old_log_probs, rollout_log_probs, response_mask)
        return {
            "mismatch_max": _max(difference.abs()),
            "mismatch_k3": token_mean(estimate_kl(-difference, "k3"), response_mask),
        }


def responses(scores: PerSequence, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> Metrics:
    """``score``: mean raw score; ``length``: mean response length in tokens."""
    lengths = sequence_lengths(response_mask, cu_seqlens).to(torch.float32)
    rows = torch.tensor(len(scores), device=scores.device)
    return {"score": Mean(scores.sum(), rows), "length": Mean(lengths.sum(), rows)}


def share(rows: RowMask) -> Mean:
    """The share of rows that are True.

    >>> share(torch.tensor([True, False])).value()
    tensor(0.5000)
    """
    return Mean(rows.sum().float(), torch.tensor(len(rows), device=rows.device))


def explained_variance(values: PerToken, returns: PerToken, response_mask: TokenMask) -> Tensor:
    """1 − Var(R − V) / Var(R) over the valid tokens: 1 is a perfect critic, 0 no better than a constant; 0 if R is one.

    >>> r = torch.tensor([[1.0, 3.0]])
    >>> explained_variance(r, r, torch.tensor([[True, True]]))
    tensor(1.)
    """
    n = response_mask.sum().clamp(min=1)

    def variance(x: Tensor) -> Tensor:
        kept = zero_outside(x, response_mask)
        return torch.where(response_mask, kept - kept.sum() / n, 0.0).square().sum() / n

    r, v = zero_outside(returns, response_mask), zero_outside(values, response_mask)
    total = variance(r)
    return torch.where(total > 0, 1 - variance(r - v) / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0)
