"""See :func:`reinforce_pp_baseline`."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from rlprims.advantage._grpo import grpo
from rlprims.advantage._responses import tokens_of_valid_rows
from rlprims.advantage._whiten import whiten
from rlprims.masking import check_tokens
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


def reinforce_pp_baseline(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    singleton: Literal["zero", "raw"] = "zero",
    ddof: int = 1,
    eps: float = 1e-8,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerToken:
    """REINFORCE++-baseline, Hu et al. 2025 (arXiv:2501.03262, version 3): centred by group, whitened over the batch.

    x_i = s_i − μ_group on each of the response's tokens, with s_i = Σ_t r_it, and A = (x − μ) / sqrt(σ² + ε) over all
    valid tokens of the batch: :func:`whiten` after ``grpo(normalize_std=False)``. Responses of a group have different
    lengths, so μ is not 0, and a group of equal rewards (x = 0) gets −μ/σ: small, the same for all of it, not 0.

    Where sources disagree: ddof is 1 in verl, 0 in OpenRLHF and NeMo-RL. Others take the batch's deviation of one
    number per response and do not centre again: that is ``grpo(std_over="batch_centred")``.

    Args:
        rewards: float (B, T) or (N,), per token.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.
        singleton: a group of one has no baseline: "zero" (x = 0) or "raw" (x = s, as verl).
        ddof: σ's divisor is N − ddof, N the valid tokens.
        eps: ε, in units of the reward squared.
        all_reduce: sums a tensor over the ranks that share the batch; None: this tensor is the batch.

    Returns:
        float, like rewards; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> reinforce_pp_baseline(torch.tensor([[1.0], [0.0], [5.0], [2.0]]), torch.tensor([0, 0, 1, 1]), m).T
    tensor([[ 0.3873, -0.3873,  1.1619, -1.1619]])
    """
    check_tokens(response_mask, cu_seqlens, rewards=rewards)
    response_mask = tokens_of_valid_rows(response_mask, cu_seqlens, valid_rows)
    centred = grpo(rewards, group_ids, response_mask, cu_seqlens, valid_rows, normalize_std=False, singleton=singleton)
    return whiten(centred, response_mask, cu_seqlens, ddof=ddof, eps=eps, all_reduce=all_reduce)
