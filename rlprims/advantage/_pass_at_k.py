"""Estimators for the best of k responses (pass@k), and for rewards of 0 and 1 that weight a prompt by its pass rate."""

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.advantage._group import divide_by_std, response_scores
from rlprims.grouping import (
    SortedGroups,
    first_rows,
    group_bounds,
    group_centred,
    group_count,
    group_mean,
    group_ranks,
    group_std,
    is_constant,
)
from rlprims.layout import sequence_ids, to_tokens
from rlprims.masking import batch_moments, check_at_least, check_choice, check_deviation, zero_outside
from rlprims.ratios import clamp_log_ratio
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask

SubsetBaseline: TypeAlias = Literal["leave_one_out_minus_one", "leave_one_out", "none"]


@described
def pass_at_k_training(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    normalize_std: bool = False,
    ddof: int = 1,
    eps: float = 1e-6,
    tolerance: float = 1e-6,
) -> PerToken:
    """The best of the group minus the second best, Tang et al. 2025 (arXiv:2503.19595).

    A_i = max_j s_j − max_{j≠i} s_j: the objective is the largest reward of the group, and the baseline the largest of
    the other responses. The best response gets its difference to the second best, and all others get 0. The k of pass@k
    is the group size; see :func:`pkpo` for smaller k. verl 0.9 (``grpo_passk``) divides by σ + ε of the group by
    default, and raises an error on a group of one, which gets 0 here.

    >>> m = torch.ones(3, 1, dtype=torch.bool)
    >>> pass_at_k_training(torch.tensor([[0.25], [1.0], [0.5]]), torch.zeros(3, dtype=torch.int64), m).T
    tensor([[0.0000, 0.5000, 0.0000]])
    """
    check_deviation(ddof, eps=eps)
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    ranks = group_ranks(s, group_ids, valid_rows)
    sorted_scores = ranks.sort(s)
    is_best = ranks.ranks == ranks.sizes - 1
    a = ranks.unsort(torch.where(is_best, sorted_scores - sorted_scores.roll(1), 0.0))
    constant = is_constant(s, group_ids, valid_rows, tolerance=tolerance)  # a group of one is constant
    if normalize_std:
        a = divide_by_std(a, group_std(s, group_ids, valid_rows, ddof=ddof), eps, constant)
    return to_tokens(torch.where(constant, 0.0, a), mask, cu_seqlens)


@described
def pkpo(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    k: int,
    baseline: SubsetBaseline = "leave_one_out_minus_one",
) -> PerToken:
    """Pass-at-k policy optimization, Walder & Karkhanis 2025 (arXiv:2505.15201), eqs. 19, 29 and 33.

    The objective is E[max of k rewards]. Its unbiased estimate from n >= k samples is the mean of the maximum over all
    k-subsets I of the group. Response i of reward s_i gets credit for the subsets that contain it:

        A_i = n / C(n, k) · Σ_{I∋i} (max_{j∈I} s_j − b_{iI}),

    The baseline b does not depend on s_i. It is the maximum over I − {i} ("leave_one_out_minus_one", eq. 33, of least
    variance), the mean of the maximum over k-subsets without i ("leave_one_out", eq. 29), or 0 ("none", eq. 19).

    Two things differ from the paper. The factor n is there because the paper sums over the group's responses, while
    losses here take a mean. In the paper the baseline of eq. 29 is n/(n − 1) times as large, so that equal rewards
    have a negative advantage. Both versions are unbiased. For k = 1 the first two baselines are that of :func:`rloo`.

    Args:
        k: size of the subsets, at least 1. A group of fewer than k responses, or of k with "leave_one_out", gets 0.

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> pkpo(torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.zeros(4, dtype=torch.int64), m, k=2).T
    tensor([[2., 0., 0., 0.]])
    """
    check_choice("baseline", baseline, SubsetBaseline)
    if k < 1:
        raise ValueError(f"k={k}, expected 1 or more: the size of the subsets")
    if baseline == "leave_one_out_minus_one" and k == 1:
        baseline = "leave_one_out"
    scores, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    low, high = group_bounds(scores.detach(), group_ids, valid_rows)
    # A is linear in the scores. The scores of each group are mapped to [0, 1]: sums over many groups then keep all
    # digits, and equal rewards give exactly 0. A group with a score that is not finite is excluded; it gets NaN below.
    is_finite = (high - low).isfinite()
    scale = torch.where(is_finite & (high > low), high - low, 1.0)
    s = zero_outside((scores - low) / scale, is_finite if valid_rows is None else is_finite & valid_rows)
    ranks = group_ranks(scores, group_ids, valid_rows)
    s, n, i = ranks.sort(s), ranks.sizes, ranks.ranks
    share = s / (n - 1).clamp(min=1)

    # Responses are numbered from 0 in ascending order. Of the C(n−1, k−1) subsets that contain i, the best response is
    # i in C(i, k−1), and j > i in C(j−1, k−2). Of the subsets of k − 1 responses below i, j is the best in C(j, k−2).
    # Of the subsets of k responses without i, j is the best in C(j, k−1) if j < i, else in C(j−1, k−1).
    a = _ratio(i, n - 1, k - 1, s.dtype) * s
    if baseline == "leave_one_out_minus_one":
        a = a - _sum_before((k - 1) * _ratio(i, n - 2, k - 2, s.dtype) * share, ranks)
    else:
        a = a + _sum_after((k - 1) * _ratio(i - 1, n - 2, k - 2, s.dtype) * share, ranks)
    if baseline == "leave_one_out":
        a = a - _sum_before(k * _ratio(i, n - 2, k - 1, s.dtype) * share, ranks)
        a = a - _sum_after(k * _ratio(i - 1, n - 2, k - 1, s.dtype) * share, ranks)
    a = k * scale * ranks.unsort(a)
    a = a + k * low if baseline == "none" else a
    minimum = k + 1 if baseline == "leave_one_out" else k
    a = torch.where(group_count(group_ids, valid_rows) >= minimum, torch.where(is_finite, a, torch.nan), 0.0)
    return to_tokens(a, mask, cu_seqlens)


def _ratio(a: Tensor, b: Tensor, m: int, dtype: torch.dtype) -> Tensor:
    """C(a, m) / C(b, m), computed factor by factor so that nothing overflows; 1 if m <= 0."""
    ratio = torch.ones_like(a, dtype=dtype)
    for t in range(m):
        ratio = ratio * (a - t).clamp(min=0) / (b - t).clamp(min=1)
    return ratio


def _sum_before(x: Tensor, ranks: SortedGroups) -> Tensor:
    """For each row the sum over the rows of its group with a lower rank; rows are sorted by ``ranks``."""
    sums, group = _running_sum(x), sequence_ids(ranks.cu, x.shape[0])
    return (sums[:-1] - sums[ranks.cu[group]]).to(x.dtype)


def _sum_after(x: Tensor, ranks: SortedGroups) -> Tensor:
    """For each row the sum over the rows of its group with a higher rank."""
    sums, group = _running_sum(x), sequence_ids(ranks.cu, x.shape[0])
    return (sums[ranks.cu[group + 1]] - sums[1:]).to(x.dtype)


def _running_sum(x: Tensor) -> Tensor:
    """The sums of the first 0, 1, ..., B entries, in float64: (B+1,)."""
    return torch.cat([x.new_zeros(1, dtype=torch.float64), x.double().cumsum(0)])


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

    The rewards of responses must be at least 0, because μ < 0 would reverse the sign of every advantage. A group with μ
    <= 0 gets 0, as in prime-rl, where ε is 0. (SkyRL divides by μ + 1e-6 for any μ.) For a group with negative rewards
    and μ > 0 there is no error, because that would read values: shift such rewards first.

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> maxrl(torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.zeros(4, dtype=torch.int64), m, eps=0.0).T
    tensor([[ 3., -1., -1., -1.]])
    """
    check_at_least(0, eps=eps)
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
    a = m c, b = (1 − m) c, c = m (1 − m) / v − 1. α = 1 + a/3 and β = 1 + b/3 minimize the gradient's second moment.
    If every prompt passes always or never, it is REINFORCE (α = β = 1); for α = β = 3/2 it is GRPO, up to a factor.

    The rewards are 0 or 1; a group with p <= 0 or p >= 1 gets 0. For several rewards, call it once for each and add the
    results. log f is clamped to ±20. ``loss_type="bnpo"`` in TRL and ms-swift is a token mean and is not related.

    Args:
        tolerance: if the deviation of p is at most this (one prompt, equal pass rates), no Beta is fitted: α = β = 1.

    >>> m, ids = torch.ones(8, 1, dtype=torch.bool), torch.arange(8) // 4
    >>> beta_normalized(torch.tensor([[1.0], [0.0], [0.0], [0.0], [1.0], [1.0], [1.0], [0.0]]), ids, m).T
    tensor([[ 0.6802, -0.2267, -0.2267, -0.2267,  0.2267,  0.2267,  0.2267, -0.6802]])
    """
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    p = group_mean(s, group_ids, valid_rows)
    is_first = first_rows(group_ids, valid_rows)[group_ids] == torch.arange(p.shape[0], device=p.device)
    moments = batch_moments(p, is_first, ddof=0, all_reduce=all_reduce)  # counts each group once
    m, v = moments.mean, moments.variance
    check_at_least(0, tolerance=tolerance)
    can_be_fitted = v > tolerance**2
    c = torch.where(can_be_fitted, m * (1 - m) / torch.where(can_be_fitted, v, 1.0) - 1, 0.0).clamp(min=0)
    alpha, beta = 1 + m * c / 3, 1 + (1 - m) * c / 3

    all_equal = (p <= 0) | (p >= 1)  # False for NaN, so that NaN rewards give NaN
    q = torch.where(all_equal, 0.5, p)
    log_beta_function = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
    log_f = (alpha - 1) * q.log() + (beta - 1) * torch.log1p(-q) - log_beta_function
    a = group_centred(s, group_ids, valid_rows) * (-clamp_log_ratio(log_f)).exp()
    return to_tokens(torch.where(all_equal, 0.0, a), mask, cu_seqlens)
