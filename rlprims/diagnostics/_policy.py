"""See :func:`policy_update` and :func:`divergences`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlprims.diagnostics._tokens import token_mean
from rlprims.masking import (
    as_bytes,
    count,
    empty_like,
    negative,
    positive,
    row_blocks,
    upcast,
    write_zero_outside,
    zero_outside,
)
from rlprims.ratios import LOG_RATIO_LIMIT, estimate_kl
from rlprims.types import Max, Mean, Metrics, PerToken, TokenMask, merge_metrics


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
    bounds = None if clip_low is None or clip_high is None else (_log(1 - clip_low), _log(1 + clip_high))
    tokens = (log_probs.detach(), old_log_probs.detach(), advantages.detach(), response_mask)
    blocks = (tuple(x[rows] for x in tokens) for rows in row_blocks(response_mask))
    return merge_metrics(*(_policy_update(*block, bounds=bounds) for block in blocks))


def _log(ratio: float) -> float:
    return math.log(ratio) if ratio > 0 else -math.inf


def _policy_update(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    mask: TokenMask,
    *,
    bounds: tuple[float, float] | None,
) -> Metrics:
    """Of one block; of the log-ratio, for the ratio itself is needed at its maximum only.

    Answers to comparisons are 1.0 and 0.0, for those to bool take torch five times as long; a dot product counts where
    two of them agree.
    """
    now, then, a = upcast(log_probs), upcast(old_log_probs), upcast(advantages)
    if torch.compiler.is_compiling():
        return _as_compiled(now, then, a, mask, bounds=bounds)
    dtype = torch.promote_types(now.dtype, then.dtype)
    moved = torch.sub(now, then, out=empty_like(now, dtype))
    write_zero_outside(mask, (moved, moved))
    moved.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    work = empty_like(now, dtype)
    tokens = count(mask)
    k3 = torch.expm1(moved, out=work).sub_(moved).sum()  # of d = −moved; 0 outside the mask
    outside = work.copy_(as_bytes(~mask))
    highest = torch.sub(moved, outside, alpha=torch.finfo(dtype).max, out=work)
    metrics = _moves(k3, highest, tokens)
    if bounds is not None:
        good, bad = positive(a, dtype).flatten(), negative(a, dtype).flatten()
        below, above = torch.lt(moved, bounds[0], out=work).flatten(), moved.gt_(bounds[1]).flatten()  # none outside
        metrics |= _shares((below.dot(bad), above.dot(good), below.dot(good), above.dot(bad)), tokens)
    return metrics


def _as_compiled(
    now: PerToken, then: PerToken, a: PerToken, mask: TokenMask, *, bounds: tuple[float, float] | None
) -> Metrics:
    """The same, selected at the end: an exponential of what a mask selected takes the compiled code twice as long."""
    moved = (now - then).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    tokens = count(mask)
    k3 = torch.where(mask, torch.expm1(moved) - moved, 0.0).sum()
    metrics = _moves(k3, torch.where(mask, moved, -math.inf), tokens)
    if bounds is not None:
        below, above, good, bad = mask & (moved < bounds[0]), mask & (moved > bounds[1]), a > 0, a < 0
        both = (below & bad, above & good, below & good, above & bad)
        metrics |= _shares([each.sum() for each in both], tokens)
    return metrics


def _moves(k3: Tensor, log_ratios: PerToken, tokens: Tensor) -> Metrics:
    highest = log_ratios.amax().exp() if log_ratios.numel() else log_ratios.sum()
    return {"approx_kl": Mean(k3, tokens), "ratio_max": Max(highest)}


def _shares(counts: Sequence[Tensor], tokens: Tensor) -> Metrics:
    names = ("clip_fraction_low", "clip_fraction_high", "outside_fraction_low", "outside_fraction_high")
    return {name: Mean(each, tokens) for name, each in zip(names, counts, strict=True)}


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
