"""See :func:`beta_normalized`."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlprims.advantage._moments import moments
from rlprims.advantage._responses import response_scores
from rlprims.grouping import group_centred, group_mean
from rlprims.layout import to_tokens
from rlprims.ratios import LOG_RATIO_LIMIT
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


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
    """Beta normalization, BNPO, Xiao et al. 2025 (arXiv:2506.02864): divided by the density of the prompts' pass rates.

    A_i = (s_i − p) / f(p; α, β) with s_i = Σ_t r_it, p its group's mean, and f the density of a Beta distribution. With
    m and v the mean and variance of p over the prompts of the batch, these p look like Beta(a, b) with
    a = m c, b = (1 − m) c, c = m (1 − m) / v − 1; α = 1 + a/3 and β = 1 + b/3 then give the gradient the least second
    moment. Where all prompts pass or fail as a whole it is REINFORCE (α = β = 1), and for α = β = 3/2, up to a factor,
    GRPO.

    The rewards are 0 or 1; a group whose mean is not between gets 0. Of several rewards, call it once for each and add.
    log f is clamped to ±20. TRL's and ms-swift's ``loss_type="bnpo"`` is a token mean and has nothing to do with this.

    Args:
        rewards: float (B, T) or (N,), per token; of a response, from 0 to 1.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.
        tolerance: if the deviation of p is not above it (one prompt, or equal pass rates), no Beta can be fitted, and
            α = β = 1.
        all_reduce: sums a tensor over the ranks that share the batch; None: this tensor is the batch.

    Returns:
        float, like rewards; 0 outside the mask, and in groups of one or of equal rewards.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> m, ids = torch.ones(8, 1, dtype=torch.bool), torch.arange(8) // 4
    >>> beta_normalized(torch.tensor([[1.0], [0.0], [0.0], [0.0], [1.0], [1.0], [1.0], [0.0]]), ids, m).T
    tensor([[ 0.6802, -0.2267, -0.2267, -0.2267,  0.2267,  0.2267,  0.2267, -0.6802]])
    """
    s, response_mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    p = group_mean(s, group_ids, valid_rows)
    over = moments(p, _one_per_group(group_ids, valid_rows), ddof=0, all_reduce=all_reduce)
    fits = over.variance > tolerance**2
    c = torch.where(fits, over.mean * (1 - over.mean) / torch.where(fits, over.variance, 1.0) - 1, 0.0).clamp(min=0.0)
    alpha, beta = 1 + over.mean * c / 3, 1 + (1 - over.mean) * c / 3
    outside = (p <= 0) | (p >= 1)  # a mean that is NaN is the caller's, and stays
    q = torch.where(outside, 0.5, p)
    log_f = (alpha - 1) * q.log() + (beta - 1) * torch.log1p(-q)
    log_f = log_f + torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
    a = group_centred(s, group_ids, valid_rows) * (-log_f.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).exp()
    return to_tokens(torch.where(outside, 0.0, a), response_mask, cu_seqlens)


def _one_per_group(group_ids: GroupIds, valid_rows: RowMask | None) -> RowMask:
    """True on the first valid row of each group."""
    rows = torch.arange(len(group_ids), device=group_ids.device)
    if valid_rows is not None:
        rows = torch.where(valid_rows, rows, len(rows))
    first = torch.full_like(rows, len(rows)).scatter_reduce(0, group_ids, rows, "amin")[group_ids]
    return (rows == first) & (rows < len(rows))
