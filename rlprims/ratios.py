"""Log-ratios of probabilities, per token and per sequence, and estimates of KL(π ‖ q) from them."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlprims.layout import expand_to_tokens, sequence_lengths, sequence_sum, to_tokens
from rlprims.masking import upcast, zero_outside
from rlprims.types import AllReduce, CuSeqlens, PerToken, TokenMask

Estimator: TypeAlias = Literal["k1", "k2", "k3", "abs"]

LOG_RATIO_LIMIT = 20.0
"""Every log-ratio is clamped to ± this limit before ``exp``: legal log-probs give finite values and gradients."""

MIN_LOG_PROB = -100.0
"""Divergences use e^−100 as the probability of a banned token (log-prob −inf): negligible and still finite."""


def clamp_log_ratio(x: Tensor) -> Tensor:
    """``x`` clamped to ±20, so that ``exp`` of it is finite."""
    return x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def log_ratio(log_probs: PerToken, old_log_probs: PerToken, mask: TokenMask) -> PerToken:
    """log_probs − old_log_probs, clamped to ±20; 0 outside the mask; only ``log_probs`` gets a gradient.

    >>> log_ratio(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -900.0]), torch.tensor([True, True]))
    tensor([ 0.5000, 20.0000])
    """
    return clamp_log_ratio(zero_outside(upcast(log_probs) - upcast(old_log_probs).detach(), mask))


def log_sigmoid(x: Tensor) -> Tensor:
    """log σ(x) = −log(e^0 + e^(−x)). torch has no rule of DTensor for the gradient of its own ``logsigmoid``.

    >>> log_sigmoid(torch.tensor([0.0, -200.0]))
    tensor([  -0.6931, -200.0000])
    """
    return -torch.logaddexp(torch.zeros_like(x), -x)


def summed_log_ratio(
    log_probs: PerToken,
    old_log_probs: PerToken,
    mask: TokenMask,
    cu_seqlens: CuSeqlens | None,
    *,
    all_reduce_rows: AllReduce | None = None,
) -> PerToken:
    """Σ_t (log_probs − old_log_probs) over each sequence, copied to its valid tokens; not clamped."""
    difference = upcast(log_probs) - upcast(old_log_probs).detach()
    return to_tokens(sequence_sum(difference, mask, cu_seqlens, all_reduce_rows=all_reduce_rows), mask, cu_seqlens)


def sequence_log_ratio(
    log_probs: PerToken,
    old_log_probs: PerToken,
    mask: TokenMask,
    cu_seqlens: CuSeqlens | None,
    *,
    mean: bool,
    all_reduce_rows: AllReduce | None = None,
) -> PerToken:
    """Sum or mean of the log-ratios of each sequence, clamped to ±20 and copied to its tokens, masked ones too.

    Only the result of a sequence is clamped, not its terms, so that it is the log-ratio of the whole response.
    """
    difference = upcast(log_probs) - upcast(old_log_probs).detach()
    total = sequence_sum(difference, mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    if mean:
        total = total / sequence_lengths(mask, cu_seqlens, all_reduce_rows=all_reduce_rows).clamp(min=1)
    return expand_to_tokens(clamp_log_ratio(total), mask, cu_seqlens)


def estimate_kl(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """KL(π ‖ q) from d = log π − log q at a sample of π: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d, abs = |d|.

    Schulman 2020, joschu.net/blog/kl-approx.html. k3's input is clamped to ±20, so that every legal log-prob gives a
    finite value and gradient. verl, OpenRLHF, SkyRL and NeMo-RL also cap its output at 10, which removes the gradient
    where the drift is largest.

    >>> estimate_kl(torch.tensor([0.0, 1.0]), "k3")
    tensor([0.0000, 0.3679])
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        d = clamp_log_ratio(log_ratio)
        return torch.expm1(-d) + d  # exp(−d) − 1 + d would be 3 times too large at d = 1e-4 in float32
    if estimator == "abs":
        return log_ratio.abs()
    raise ValueError(f"estimator={estimator!r}, expected 'k1', 'k2', 'k3' or 'abs'")
