"""Metrics that compare two policies on the same tokens: old and current policy, reference, sampler."""

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.diagnostics._tokens import check_like_mask, mean_over_tokens, token_max, token_share, weight_stats
from rlprims.kernels import are_readable
from rlprims.layout import sequence_lengths, sequence_sum
from rlprims.masking import check_at_least, check_tokens, zero_outside
from rlprims.ratios import clamp_log_ratio, estimate_kl, log_ratio
from rlprims.types import CuSeqlens, Metrics, PerToken, TokenMask, Versions


@described
def ratio_stats(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    response_mask: TokenMask,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> Metrics:
    """Metrics of the change of the policy within a step.

    ``approx_kl``: k3 of KL(π_old ‖ π) from samples of π_old; ``ratio_max``; with both bounds given, the shares of
    tokens whose ratio is below 1 − clip_low or above 1 + clip_high, by side and by sign of the advantage.
    ``clip_fraction_low`` (below, A < 0) and ``clip_fraction_high`` (above, A > 0) get no gradient;
    ``outside_fraction_low`` (below, A > 0) and ``outside_fraction_high`` (above, A < 0) keep their gradient: it moves
    the ratio back into the bounds. Log-ratios are clamped to ±20, as in the losses.

    >>> import torch
    >>> m = torch.tensor([[True, True]])
    >>> new, old, a = torch.tensor([[0.5, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2)
    >>> metrics = ratio_stats(new, old, a, m, clip_low=0.2, clip_high=0.2)
    >>> metrics["clip_fraction_high"].value()
    tensor(0.5000)
    """
    check_like_mask(response_mask, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_at_least(0, inf=True, clip_low=clip_low, clip_high=clip_high)
    log_ratios = log_ratio(log_probs.detach(), old_log_probs, response_mask)
    ratio = log_ratios.exp()
    metrics: Metrics = {
        "approx_kl": mean_over_tokens(estimate_kl(-log_ratios, "k3"), response_mask),
        "ratio_max": token_max(ratio, response_mask),
    }
    if clip_low is None or clip_high is None:
        return metrics
    below, above = response_mask & (ratio < 1 - clip_low), response_mask & (ratio > 1 + clip_high)
    negative, positive = advantages < 0, advantages > 0
    return metrics | {
        "clip_fraction_low": token_share(below & negative, response_mask),
        "clip_fraction_high": token_share(above & positive, response_mask),
        "outside_fraction_low": token_share(below & positive, response_mask),
        "outside_fraction_high": token_share(above & negative, response_mask),
    }


@described
def divergences(log_probs: PerToken, ref_log_probs: PerToken, response_mask: TokenMask) -> Metrics:
    """KL(π ‖ π_ref) per token from samples of π: ``kl_k1`` (unbiased, noisy), ``kl_k2``, ``kl_k3`` (unbiased, >= 0).

    A k1 below 0 and a k3 above 0 show that the samples are not from π. See :func:`rlprims.ratios.estimate_kl`.

    >>> import torch
    >>> metrics = divergences(torch.tensor([[0.0]]), torch.tensor([[-1.0]]), torch.tensor([[True]]))
    >>> [round(float(kl.value()), 4) for kl in metrics.values()]
    [1.0, 0.5, 0.3679]
    """
    check_like_mask(response_mask, log_probs=log_probs, ref_log_probs=ref_log_probs)
    d = zero_outside(log_probs, response_mask) - zero_outside(ref_log_probs, response_mask)
    return {
        "kl_k1": mean_over_tokens(estimate_kl(d, "k1"), response_mask),
        "kl_k2": mean_over_tokens(estimate_kl(d, "k2"), response_mask),
        "kl_k3": mean_over_tokens(estimate_kl(d, "k3"), response_mask),
    }


@described
def sampler_mismatch(
    old_log_probs: PerToken, rollout_log_probs: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None
) -> Metrics:
    """The difference between trainer and sampler on the same tokens; at the first step of a run it should be rounding.

    - ``mismatch_max``: the largest |difference| of log-probs in nats, clamped at 20.
    - ``mismatch_k1``, ``mismatch_k3``: estimates of KL(sampler ‖ trainer); k3 with differences clamped to ±20.
    - ``mismatch_probability``: the mean |difference| of the probabilities.
    - ``mismatch_ess``, ``mismatch_chi2``: effective share and χ² of :func:`weight_stats` for the ratios trainer /
      sampler of tokens; ``mismatch_ess_sequence``, ``mismatch_chi2_sequence``: for the products of the ratios over each
      response. Log-ratios are clamped to ±20.
    """
    check_tokens(response_mask, cu_seqlens, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    trainer = zero_outside(old_log_probs.detach(), response_mask)
    sampler = zero_outside(rollout_log_probs.detach(), response_mask)
    difference = trainer - sampler
    log_ratios = clamp_log_ratio(difference)
    sequence_log_ratios = clamp_log_ratio(sequence_sum(difference, response_mask, cu_seqlens))
    token_weights = weight_stats(log_ratios.exp(), response_mask)
    sequence_weights = weight_stats(sequence_log_ratios.exp(), sequence_lengths(response_mask, cu_seqlens) > 0)
    return {
        "mismatch_max": token_max(log_ratios.abs(), response_mask),
        "mismatch_k1": mean_over_tokens(-difference, response_mask),
        "mismatch_k3": mean_over_tokens(estimate_kl(-difference, "k3"), response_mask),
        "mismatch_probability": mean_over_tokens((trainer.exp() - sampler.exp()).abs(), response_mask),
        "mismatch_ess": token_weights["weight_ess"],
        "mismatch_chi2": token_weights["weight_chi2"],
        "mismatch_ess_sequence": sequence_weights["weight_ess"],
        "mismatch_chi2_sequence": sequence_weights["weight_chi2"],
    }


@described
def staleness(versions: Versions, current_version: int | Tensor, response_mask: TokenMask) -> Metrics:
    """The age of the weights that drew each valid token, in updates: current_version − version.

    ``staleness``: the mean over tokens, as in verl since its pull request 7569; ``staleness_max``; ``stale_fraction``:
    the share of tokens that older weights drew. A response may have tokens of several versions.

    Args:
        versions: the version of the weights that drew the token.
        current_version: int, the version of the weights that are trained; no valid token has a newer one.

    >>> m = torch.tensor([[True, True, True, False]])
    >>> metrics = staleness(torch.tensor([[4, 4, 5, 0]]), 5, m)
    >>> {name: round(float(metric.value()), 4) for name, metric in metrics.items()}
    {'staleness': 0.6667, 'staleness_max': 1.0, 'stale_fraction': 0.6667}
    """
    check_like_mask(response_mask, versions=versions)
    if versions.is_floating_point() or versions.dtype is torch.bool:
        raise ValueError(f"versions has dtype {versions.dtype}, expected integers: the number of updates before")
    age = torch.where(response_mask, current_version - versions, 0)
    if are_readable(age) and (age < 0).any():
        newest = int(torch.where(response_mask, versions, 0).amax())
        raise ValueError(f"current_version={int(current_version)}, expected at least {newest}, the newest version")
    return {
        "staleness": mean_over_tokens(age, response_mask),
        "staleness_max": token_max(age, response_mask),
        "stale_fraction": token_share(age > 0, response_mask),
    }


@described
def support_mass(log_probs: PerToken, whole_log_probs: PerToken, response_mask: TokenMask) -> Metrics:
    """The probability mass of the kept sets under the policy: S = Σ_{v∈K} π_v = π(a) / π_K(a), for any a in K.

    ``support_mass``: mean of S, 1 without truncation; it falls as the policy moves to tokens that were not kept. It is
    the bias of a trainer that does not use the sets (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).
    ``outside_support``: share of tokens that are not in their own set, which must be 0; they are not in the mean.

    Args:
        log_probs: within the kept sets: ``logprobs.from_logits(logits, token_ids, kept)``.
        whole_log_probs: like log_probs, of the whole vocabulary: ``logprobs.from_logits(logits, token_ids)``.

    >>> import torch
    >>> metrics = support_mass(torch.tensor([[0.5]]).log(), torch.tensor([[0.4]]).log(), torch.tensor([[True]]))
    >>> metrics["support_mass"].value()
    tensor(0.8000)
    """
    check_like_mask(response_mask, log_probs=log_probs, whole_log_probs=whole_log_probs)
    inside = response_mask & (log_probs > -torch.inf)
    log_mass = zero_outside(whole_log_probs.detach(), inside) - zero_outside(log_probs.detach(), inside)
    return {
        "support_mass": mean_over_tokens(log_mass.exp(), inside),
        "outside_support": token_share(~inside, response_mask),
    }
