"""Estimators whose objective is the best of k responses (pass@k), with k equal to the group size or smaller."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.advantage._group import divide_by_std, response_scores
from rlprims.grouping import Ranks, group_bounds, group_count, group_ranks, group_std, is_constant
from rlprims.layout import sequence_ids, to_tokens
from rlprims.masking import check_choice, check_deviation, zero_outside
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask

SubsetBaseline: TypeAlias = Literal["leave_one_out_minus_one", "leave_one_out", "none"]


@described
def pass_at_k(
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

    The objective is the largest reward of the group, max_j s_j, and the baseline of response i is the largest reward of
    the other responses: A_i = max_j s_j − max_{j≠i} s_j. The best response gets its difference to the second best, and
    all others get 0. If two responses are best, all get 0. The k of pass@k is the group size; see :func:`pkpo` for
    smaller k.

    verl 0.9 (``grpo_passk``) divides by σ + ε of the group by default, and raises an error on a group of one.

    Returns:
        0 outside the mask, and in groups of one.

    >>> m = torch.ones(3, 1, dtype=torch.bool)
    >>> pass_at_k(torch.tensor([[0.25], [1.0], [0.5]]), torch.zeros(3, dtype=torch.int64), m).T
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

    The objective is E[max of k rewards]. Its unbiased estimate from n >= k samples per prompt is the mean of the
    maximum over all k-subsets I of the group. With s_i the rewards, response i gets credit for the subsets that contain
    it:

        A_i = n / C(n, k) · Σ_{I∋i} (max_{j∈I} s_j − b_{iI}),

    The baseline b does not depend on s_i. It is the maximum over I without i ("leave_one_out_minus_one", eq. 33, the
    one of least variance in the paper), the mean of the maximum over the k-subsets without i ("leave_one_out",
    eq. 29), or 0 ("none", eq. 19).

    Two things differ from the paper. The factor n is there because the paper sums over the group's responses, while
    losses here take a mean. In the paper the baseline of eq. 29 is n/(n − 1) times as large, so that equal rewards
    have a negative advantage. Both versions are unbiased. For k = 1 the first two baselines are that of :func:`rloo`.

    Args:
        k: size of the subsets, at least 1. A group of fewer than k responses, or of k with "leave_one_out", gets 0.
        baseline: b.

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


def _sum_before(x: Tensor, ranks: Ranks) -> Tensor:
    """For each row the sum over the rows of its group with a lower rank; rows are sorted by ``ranks``."""
    sums, group = _running_sum(x), sequence_ids(ranks.cu, x.shape[0])
    return (sums[:-1] - sums[ranks.cu[group]]).to(x.dtype)


def _sum_after(x: Tensor, ranks: Ranks) -> Tensor:
    """For each row the sum over the rows of its group with a higher rank."""
    sums, group = _running_sum(x), sequence_ids(ranks.cu, x.shape[0])
    return (sums[ranks.cu[group + 1]] - sums[1:]).to(x.dtype)


def _running_sum(x: Tensor) -> Tensor:
    """The sums of the first 0, 1, ..., B entries, in float64: (B+1,)."""
    return torch.cat([x.new_zeros(1, dtype=torch.float64), x.double().cumsum(0)])
