"""See :func:`grpo`."""

from typing import Literal

import torch

from rlprims.grouping import group_centred, group_count, group_std, is_constant
from rlprims.masking import check_sequences, check_tokens, sequence_sum, to_tokens
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


def grpo(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Literal["zero", "raw", "error"] = "zero",
    tolerance: float = 1e-6,
) -> PerToken:
    """Group-relative advantage, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2.

    With s_i = Σ_t r_it the response's reward and μ, σ over the group: A_i = (s_i − μ) / (σ + ε) on each of its tokens.
    ``normalize_std=False`` is Dr. GRPO's A_i = s_i − μ (Liu et al. 2025, arXiv:2503.20783, eq. 2).

    Where sources disagree: σ has divisor n − 1 as in verl, TRL, OpenRLHF, SkyRL and slime (``ddof=0``: rllm,
    open-instruct); ε = 1e-6 is verl's, TRL has 1e-4, OpenRLHF 1e-9. A group of equal rewards gets exactly 0 by a range
    test, where all of those can amplify its rounding residue.

    Args:
        rewards: float (B, T) or (N,), per token.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that enter the group's statistics; None: all.
        normalize_std: divide by σ + ε.
        ddof: σ's divisor is n − ddof.
        eps: ε, in units of the reward.
        singleton: a group of one has no baseline: "zero" (A = 0), "raw" (A = s, as verl), or "error".
        tolerance: the group is constant if max − min <= tolerance · max(1, |s|).

    Returns:
        float, like rewards; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; a group of one under ``singleton="error"``.

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> grpo(torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.zeros(4, dtype=torch.int64), m).T
    tensor([[ 1.5000, -0.5000, -0.5000, -0.5000]])
    """
    check_tokens(response_mask, cu_seqlens, rewards=rewards)
    check_sequences(response_mask, cu_seqlens, group_ids=group_ids)
    s = sequence_sum(rewards, response_mask, cu_seqlens)
    alone = group_count(group_ids, valid_rows) <= 1
    if singleton == "error" and bool(alone.any()):
        raise ValueError("a group has one valid row, so no baseline: sample more per prompt, or singleton='zero'|'raw'")
    a = group_centred(s, group_ids, valid_rows)
    if normalize_std:
        a = a / (group_std(s, group_ids, valid_rows, ddof=ddof) + eps)
    a = torch.where(is_constant(s, group_ids, valid_rows, tolerance=tolerance), 0.0, a)
    a = torch.where(alone, s if singleton == "raw" else 0.0, a)
    return to_tokens(a, response_mask, cu_seqlens)
