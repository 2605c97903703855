"""See :func:`gpg`."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rlprims.advantage._responses import response_scores
from rlprims.grouping import group_centred, group_count, is_constant
from rlprims.layout import to_tokens
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


def gpg(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    informative: Literal["varied_group", "nonzero_reward"] = "varied_group",
    singleton: Literal["zero", "raw"] = "zero",
    tolerance: float = 1e-6,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerToken:
    """Group policy gradient, Chu et al. 2025 (arXiv:2504.02546): centred rewards, rescaled for the groups that teach.

    A_i = α (s_i − μ_group) with α = B / (B − M), where M of the batch's B responses are in groups of equal rewards and
    have no gradient: without α a mean over the batch shrinks with every such group.

    verl 0.9 takes for B − M the responses whose reward is not 0 (``informative="nonzero_reward"``). That is another
    number even for rewards of 0 and 1, and no correction at all for −1 and 1. The paper's divisor F_norm is 1 here; for
    the group's deviation see :func:`grpo`.

    Args:
        rewards: float (B, T) or (N,), per token.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.
        informative: what B − M counts.
        singleton: a group of one has no baseline: "zero" (A = 0) or "raw" (A = α s, as verl).
        tolerance: the group is constant if max − min <= tolerance · max(1, |s|).
        all_reduce: sums a tensor over the ranks that share the batch; None: this tensor is the batch.

    Returns:
        float, like rewards; 0 outside the mask, and in groups of equal rewards.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> gpg(torch.tensor([[1.0], [0.0], [1.0], [1.0]]), torch.tensor([0, 0, 1, 1]), m).T
    tensor([[ 1., -1.,  0.,  0.]])
    """
    s, response_mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    alone = group_count(group_ids, valid_rows) <= 1
    silent = is_constant(s, group_ids, valid_rows, tolerance=tolerance) | alone
    rows = torch.ones_like(silent) if valid_rows is None else valid_rows
    counted = rows & (~silent if informative == "varied_group" else s != 0)
    counts = torch.stack([rows.sum(), counted.sum()]).to(s.dtype)
    everyone, teaching = counts if all_reduce is None else all_reduce(counts)
    a = torch.where(silent, 0.0, group_centred(s, group_ids, valid_rows))
    a = torch.where(alone, s if singleton == "raw" else 0.0, a)
    return to_tokens(everyone / teaching.clamp(min=1) * a, response_mask, cu_seqlens)
