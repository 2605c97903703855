"""See :func:`quantile`."""

import torch

from rlprims.advantage._responses import response_scores
from rlprims.grouping import group_bounds, group_count, group_ranks, group_std, is_constant
from rlprims.layout import to_tokens
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


def quantile(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    level: float = 0.4,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    tolerance: float = 1e-6,
) -> PerToken:
    """Quantile advantage estimation (arXiv:2509.22611): a quantile of the group as baseline, not its mean.

    A_i = (s_i − Q) / (σ + ε) with s_i = Σ_t r_it and Q = inf {x: F(x) >= level} of the group's rewards, the smallest of
    them that a share of ``level`` does not exceed. For rewards of 0 and 1 and p of the group right: if p <= 1 − level,
    Q = 0 and only right answers have an advantage, which is positive; else Q = 1 and only wrong ones have, negative.

    The quantile is one of the rewards: no interpolation, which is the default of ``torch.quantile`` and would give all
    responses an advantage again.

    Args:
        rewards: float (B, T) or (N,), per token.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.
        level: K of the paper, above 0 and up to 1.
        normalize_std: divide by σ + ε.
        ddof: σ's divisor is n − ddof.
        eps: ε, in units of the reward.
        tolerance: the group is constant if max − min <= tolerance · max(1, |s|), and gets 0.

    Returns:
        float, like rewards; 0 outside the mask, and in groups of one.

    Raises:
        ValueError: shapes or dtypes that do not fit; a level outside (0, 1].

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> quantile(torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.zeros(4, dtype=torch.int64), m).T
    tensor([[2.0000, 0.0000, 0.0000, 0.0000]])
    """
    if not 0 < level <= 1:
        raise ValueError(f"level is {level}, needs more than 0 and at most 1: the share that the baseline is not below")
    s, response_mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    low, _ = group_bounds(s, group_ids, valid_rows)
    ranks = group_ranks(s, group_ids, valid_rows)
    # Rank ceil(level · n) counted from 1; the little that is taken off is for the rounding of the product.
    rank = (level * ranks.sizes - 1e-4).ceil().long().clamp(min=1) - 1
    above = ranks.sort(s - low)
    first = torch.arange(len(s), device=s.device) - ranks.ranks
    a = ranks.unsort(above - above[first + rank])
    if normalize_std:
        a = a / (group_std(s, group_ids, valid_rows, ddof=ddof) + eps)
    silent = is_constant(s, group_ids, valid_rows, tolerance=tolerance) | (group_count(group_ids, valid_rows) <= 1)
    return to_tokens(torch.where(silent, 0.0, a), response_mask, cu_seqlens)
