"""Estimators for rewards of 0 and 1 that weight a prompt by its pass rate: MaxRL and Beta normalization."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.advantage._group import response_scores
from rlprims.grouping import first_rows, group_centred, group_mean
from rlprims.layout import to_tokens
from rlprims.masking import batch_moments, check_range
from rlprims.ratios import clamp_log_ratio
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


@described
def maxrl(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    eps: float = 1e-6,
) -> PerToken:
    """Maximum-likelihood RL (arXiv:2602.02710): the centred reward divided by the group's mean reward.

    A_i = (s_i − μ) / (μ + ε) with s_i = Σ_t r_it. With rewards of 0 and 1, a prompt with pass rate p has weight 1/p, as
    in the gradient of log p; with GRPO its weight is 1/sqrt(p(1 − p)). With ε = 0 and n samples its expectation is
    exactly the gradient of −Σ_{k<n} (1 − p)^k / k, the first terms of log p.

    The rewards must be at least 0, because μ < 0 would reverse the sign of every advantage. A group with μ <= 0 gets 0,
    as in prime-rl. (SkyRL divides by μ + 1e-6 for any μ; rewards of ±1 with mean 0 then give advantages of ±1e6.) For a
    group with negative rewards and μ > 0 there is no error, because that would read values: shift such rewards first.

    Args:
        rewards: per token; of a response, at least 0.
        eps: ε, in units of the reward; 0 in prime-rl.

    Returns:
        0 outside the mask, in groups of one or of equal rewards, and where μ <= 0.

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> maxrl(torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.zeros(4, dtype=torch.int64), m, eps=0.0).T
    tensor([[ 3., -1., -1., -1.]])
    """
    check_range(0, math.inf, eps=eps)
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    mean = group_mean(s, group_ids, valid_rows)
    has_no_weight = mean <= 0  # False for NaN, so that NaN rewards give NaN
    a = group_centred(s, group_ids, valid_rows) / torch.where(has_no_weight, 1.0, mean + eps)
    return to_tokens(torch.where(has_no_weight, 0.0, a), mask, cu_seqlens)


@described
def beta_normalized(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    tolerance: float = 1e-6,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerToken:
    """Beta normalization, BNPO, Xiao et al. 2025 (arXiv:2506.02864): divides by a Beta density of the pass rate.

    A_i = (s_i − p) / f(p; α, β) with s_i = Σ_t r_it, p its group's mean, and f the density of a Beta distribution. With
    m and v the mean and variance of p over the prompts of the batch, the method of moments fits Beta(a, b) to p:
    a = m c, b = (1 − m) c, c = m (1 − m) / v − 1. α = 1 + a/3 and β = 1 + b/3 then minimize the second moment of the
    gradient. If every prompt passes always or never, it is REINFORCE (α = β = 1). For α = β = 3/2 it is GRPO, up to a
    factor.

    The rewards are 0 or 1; a group with p <= 0 or p >= 1 gets 0. For several rewards, call it once for each and add the
    results. log f is clamped to ±20. ``loss_type="bnpo"`` in TRL and ms-swift is a token mean and is not related.

    Args:
        rewards: per token; of a response, from 0 to 1.
        tolerance: if the deviation of p is at most this (one prompt, or equal pass rates), α = β = 1: no Beta can be
            fitted.

    Returns:
        0 outside the mask, and in groups of one or of equal rewards.

    >>> m, ids = torch.ones(8, 1, dtype=torch.bool), torch.arange(8) // 4
    >>> beta_normalized(torch.tensor([[1.0], [0.0], [0.0], [0.0], [1.0], [1.0], [1.0], [0.0]]), ids, m).T
    tensor([[ 0.6802, -0.2267, -0.2267, -0.2267,  0.2267,  0.2267,  0.2267, -0.6802]])
    """
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    p = group_mean(s, group_ids, valid_rows)
    is_first = first_rows(group_ids, valid_rows)[group_ids] == torch.arange(p.shape[0], device=p.device)
    moments = batch_moments(p, is_first, ddof=0, all_reduce=all_reduce)  # counts each group once
    m, v = moments.mean, moments.variance
    can_be_fitted = v > tolerance**2
    c = torch.where(can_be_fitted, m * (1 - m) / torch.where(can_be_fitted, v, 1.0) - 1, 0.0).clamp(min=0)
    alpha, beta = 1 + m * c / 3, 1 + (1 - m) * c / 3

    all_equal = (p <= 0) | (p >= 1)  # False for NaN, so that NaN rewards give NaN
    q = torch.where(all_equal, 0.5, p)
    log_beta_function = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
    log_f = (alpha - 1) * q.log() + (beta - 1) * torch.log1p(-q) - log_beta_function
    a = group_centred(s, group_ids, valid_rows) * (-clamp_log_ratio(log_f)).exp()
    return to_tokens(torch.where(all_equal, 0.0, a), mask, cu_seqlens)
