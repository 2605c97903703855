"""See :func:`opo`."""

from typing import Literal

import torch

from rlprims.advantage._responses import response_scores
from rlprims.grouping import group_bounds, group_count
from rlprims.layout import sequence_lengths, to_tokens
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


def opo(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    singleton: Literal["zero", "raw"] = "zero",
) -> PerToken:
    """On-policy RL with optimal baseline, Hao et al. 2025 (arXiv:2505.23585): a baseline weighted by length.

    A_i = s_i − Σ_j L_j s_j / Σ_j L_j over the group, with s_i = Σ_t r_it and L_i the valid tokens of response i. The
    baseline of least variance weighs by the squared norm of a response's gradient, which the paper takes to grow with
    its length. The sample's own reward is in it, as in :func:`grpo`, which costs 1/n of the baseline's own gradient.

    A group of which one response only has tokens gets 0; where none has, verl 0.9 answers NaN.

    Args:
        rewards: float (B, T) or (N,), per token.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.
        singleton: a group of one has no baseline: "zero" (A = 0) or "raw" (A = s, as verl).

    Returns:
        float, like rewards; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> m = torch.tensor([[True, True, True], [True, False, False]])
    >>> opo(torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), torch.tensor([0, 0]), m)
    tensor([[ 0.2500,  0.2500,  0.2500],
            [-0.7500,  0.0000,  0.0000]])
    """
    s, response_mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    alone = group_count(group_ids, valid_rows) <= 1
    lengths = sequence_lengths(response_mask, cu_seqlens)
    # Measured from the group's minimum, so that equal rewards give exactly 0.
    low, _ = group_bounds(s, group_ids, valid_rows)
    above = s - low
    weighted = torch.zeros_like(s).index_add(0, group_ids, torch.where(lengths > 0, lengths * above, 0.0))
    weights = torch.zeros_like(lengths).index_add(0, group_ids, lengths)
    a = above - (weighted / weights.clamp(min=1))[group_ids]
    return to_tokens(torch.where(alone, s if singleton == "raw" else 0.0, a), response_mask, cu_seqlens)
