"""See :func:`pass_at_k`."""

import math

from rlprims._groups import Groups, Numbers, constant, moments_of, on_groups, squares_of, variance_of
from rlprims.advantage._responses import paid, response_scores
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


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
    """The best of the group against the second best, Tang et al. 2025 (arXiv:2503.19595).

    The objective is the largest reward of the group, max_j s_j, and the baseline of response i is the largest of the
    others. Leave-one-out this way, A_i = max_j s_j − max_{j≠i} s_j: the best response gets its lead over the second
    best, every other 0, and all get 0 if two share the lead. The k of pass@k is the size of the group; see :func:`pkpo`
    for a smaller one.

    verl 0.9 (``grpo_passk``) divides by σ + ε of the group unless told otherwise, and raises on a group of one.

    Args:
        rewards: float (B, T) or (N,), per token.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.
        normalize_std: divide by σ + ε.
        ddof: σ's divisor is n − ddof.
        eps: ε, in units of the reward.
        tolerance: the group is constant if max − min <= tolerance · max(1, |s|), and gets 0.

    Returns:
        float, like rewards; 0 outside the mask, and in groups of one.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> m = torch.ones(3, 1, dtype=torch.bool)
    >>> pass_at_k(torch.tensor([[0.25], [1.0], [0.5]]), torch.zeros(3, dtype=torch.int64), m).T
    tensor([[0.0000, 0.5000, 0.0000]])
    """
    s, response_mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)

    def leads(g: Groups, s: Numbers) -> tuple[Numbers]:
        first = s >= g.rows(g.high(s))
        alone = g.sum(g.where(first, s * 0 + 1, 0.0)) == 1
        a = s - g.rows(g.high(g.where(first, -math.inf, s)))
        if not normalize_std:
            teaches = alone & ~constant(g, s, tolerance)  # a group of one is constant
        else:
            group = moments_of(g, s)
            squares = squares_of(g, group)
            teaches = alone & ~constant(g, s, tolerance, squares, group.size)
            a = a / g.rows(g.where(teaches, variance_of(g, squares, group.size, ddof), math.inf) ** 0.5 + eps)
        return (g.where(first & g.rows(teaches), a, 0.0),)

    return paid(on_groups(leads, group_ids, valid_rows, s)[0], response_mask, cu_seqlens)
