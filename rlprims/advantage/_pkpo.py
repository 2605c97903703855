"""See :func:`pkpo`."""

from typing import Literal

import torch
from torch import Tensor

from rlprims.advantage._responses import response_scores
from rlprims.grouping import check_group_ids, group_bounds, group_ranks
from rlprims.layout import to_tokens
from rlprims.recurrence import reverse_recurrence
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


def pkpo(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    k: int,
    baseline: Literal["leave_one_out_minus_one", "leave_one_out", "none"] = "leave_one_out_minus_one",
) -> PerToken:
    """Pass-at-k policy optimization, Walder & Karkhanis 2025 (arXiv:2505.15201), eqs. 19, 29 and 33.

    The objective is E[max of k rewards], estimated without bias from n >= k samples per prompt: the mean of the maximum
    over all k-subsets I of the group. With s_i the rewards, response i is paid for the subsets that it is in,

        A_i = n / C(n, k) · Σ_{I∋i} (max_{j∈I} s_j − b_{iI}),

    and the baseline b, which does not see s_i, is the maximum over I without i ("leave_one_out_minus_one", eq. 33, of
    the least variance by the paper: what i adds), the mean of the maximum over the k-subsets without i
    ("leave_one_out", eq. 29), or 0 ("none", eq. 19).

    Here differs from the paper: the factor n makes a mean over the group's responses the gradient, as in the other
    estimators, where the paper sums; and eq. 29 weighs its baseline by n/(n − 1) more, which leaves equal rewards a
    negative advantage. Both are unbiased. k = 1 has no subset to take i from, and the first two are :func:`rloo`.

    Args:
        rewards: float (B, T) or (N,), per token.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.
        k: size of the subsets. A group of fewer than k, or of k under "leave_one_out", gets 0.
        baseline: what is taken off.

    Returns:
        float, like rewards; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; k below 1.

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> pkpo(torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.zeros(4, dtype=torch.int64), m, k=2).T
    tensor([[2., 0., 0., 0.]])
    """
    if k < 1:
        raise ValueError(f"k is {k}, needs 1 or more: the size of the subsets whose best counts")
    s, response_mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    check_group_ids(group_ids)
    if baseline == "leave_one_out_minus_one" and k == 1:
        baseline = "leave_one_out"
    above = s if baseline == "none" else s - group_bounds(s, group_ids, valid_rows)[0]
    above = above if valid_rows is None else torch.where(valid_rows, above, 0.0)  # adds nothing to a sum over others
    ranks = group_ranks(s, group_ids, valid_rows)
    g, n, i, cu = ranks.sort(above), ranks.sizes, ranks.ranks, ranks.cu
    share = g / (n - 1).clamp(min=1)

    # Of the C(n−1, k−1) subsets that hold i, counted from 0 in ascending order, i is the best of C(i, k−1), and j > i
    # of C(j−1, k−2). Without i, the best of k − 1 lower ones is j in C(j, k−2) cases; of any k, in C(j or j−1, k−1).
    a = _ratio(i, n - 1, k - 1, g) * g
    if baseline == "leave_one_out_minus_one":
        a = a - _sum_before((k - 1) * _ratio(i, n - 2, k - 2, g) * share, cu)
    else:
        a = a + _sum_beyond((k - 1) * _ratio(i - 1, n - 2, k - 2, g) * share, cu)
    if baseline == "leave_one_out":
        a = a - _sum_before(k * _ratio(i, n - 2, k - 1, g) * share, cu)
        a = a - _sum_beyond(k * _ratio(i - 1, n - 2, k - 1, g) * share, cu)
    enough = n >= (k + 1 if baseline == "leave_one_out" else k)
    return to_tokens(ranks.unsort(torch.where(enough, k * a, 0.0)), response_mask, cu_seqlens)


def _ratio(a: Tensor, b: Tensor, m: int, like: Tensor) -> Tensor:
    """C(a, m) / C(b, m) in the precision of ``like``, factor by factor so that nothing overflows; 1 if m <= 0."""
    ratio = torch.ones_like(like)
    for t in range(m):
        ratio = ratio * (a - t).clamp(min=0).to(like.dtype) / (b - t).clamp(min=1)
    return ratio


def _sum_beyond(x: Tensor, cu: CuSeqlens) -> Tensor:
    """For each row the sum over those of its group with a higher rank."""
    return reverse_recurrence(torch.ones_like(x), x, x.new_zeros(len(cu) - 1), cu)[1]


def _sum_before(x: Tensor, cu: CuSeqlens) -> Tensor:
    return _sum_beyond(x.flip(0), len(x) - cu.flip(0)).flip(0)
