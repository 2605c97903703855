"""See :func:`gdpo`."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rlprims.advantage._grpo import standard_scores
from rlprims.advantage._moments import moments
from rlprims.advantage._responses import tokens_of_valid_rows
from rlprims.layout import sequence_lengths, to_tokens
from rlprims.masking import check_sequences, check_tokens, upcast
from rlprims.types import ComponentScores, CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


def gdpo(
    component_scores: ComponentScores,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    weights: tuple[float, ...] | None = None,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: Literal["zero", "raw"] = "zero",
    tolerance: float = 1e-6,
    whiten_over: Literal["responses", "tokens", "none"] = "responses",
    whiten_eps: float = 1e-6,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerToken:
    """Group reward-decoupled normalization (arXiv:2601.05242): each reward normalized alone, then summed.

    With s_ik the score of response i by reward k: z_ik = (s_ik − μ_k) / (σ_k + ε) over the group, x_i = Σ_k w_k z_ik,
    and A_i = (x_i − μ) / (σ + ε') over the responses of the batch. Rewards that differ in scale keep their weights; and
    of two responses, one that leads by two rewards gets more than one that leads by one, where the z-score of the sum
    is ±0.71 for both.

    Where sources disagree: the last step is over responses in the paper, TRL, ms-swift and NeMo-RL, and over tokens in
    verl 0.9 (``whiten_over="tokens"``), so that long responses count for more. ε and ε' are 1e-4 in TRL, 1e-8 in
    ms-swift; NeMo-RL has no ε'. A filter on groups must look at every component: a group whose sums are equal teaches.

    Args:
        component_scores: float (B, K), one column for each reward. Rewards per token are not read, so a KL in the
            reward has no effect.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool (B, T) or (N,).
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.
        weights: w_k, one for each reward; None: all 1.
        normalize_std: divide by σ_k + ε.
        ddof: every σ's divisor is n − ddof.
        eps: ε, in units of the reward.
        singleton: a group of one has no baseline: "zero" (z = 0) or "raw" (z = s, as verl).
        tolerance: reward k is constant in a group if max − min <= tolerance · max(1, |s|), and z_k is 0 there.
        whiten_over: what the last step's μ and σ are over; "none" leaves it out.
        whiten_eps: ε'.
        all_reduce: sums a tensor over the ranks that share the batch; None: this tensor is the batch.

    Returns:
        float, like the mask; 0 outside it. A response without a token has scores of 0.

    Raises:
        ValueError: shapes or dtypes that do not fit; weights of another number than K.

    >>> s = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 10.0], [0.0, 20.0]])
    >>> gdpo(s, torch.tensor([0, 0, 1, 1]), torch.ones(4, 1, dtype=torch.bool), weights=(1.0, 0.5)).T
    tensor([[ 1.0954, -1.0954,  0.5477, -0.5477]])
    """
    check_tokens(response_mask, cu_seqlens)
    check_sequences(response_mask, cu_seqlens, group_ids=group_ids)
    if component_scores.dim() != 2 or len(component_scores) != len(group_ids):
        raise ValueError(
            f"component_scores has shape {tuple(component_scores.shape)}, needs ({len(group_ids)}, K): one row per "
            "response, one column per reward"
        )
    w = (1.0,) * component_scores.shape[1] if weights is None else weights
    if len(w) != component_scores.shape[1]:
        raise ValueError(
            f"component_scores has {component_scores.shape[1]} columns and weights {len(w)} entries: give one weight "
            "for each reward"
        )
    response_mask = tokens_of_valid_rows(response_mask, cu_seqlens, valid_rows)
    present = sequence_lengths(response_mask, cu_seqlens) > 0
    scores = torch.where(present[:, None], upcast(component_scores), 0.0)
    x = scores.new_zeros(len(scores))
    for weight, s in zip(w, scores.unbind(1), strict=True):
        x = x + weight * standard_scores(
            s,
            group_ids,
            valid_rows,
            normalize_std=normalize_std,
            ddof=ddof,
            eps=eps,
            singleton=singleton,
            tolerance=tolerance,
        )
    if whiten_over == "responses":
        rows = torch.ones_like(present) if valid_rows is None else valid_rows
        x = _standard(x, rows, ddof=ddof, eps=whiten_eps, all_reduce=all_reduce)
    a = to_tokens(x, response_mask, cu_seqlens)
    if whiten_over == "tokens":
        a = _standard(a, response_mask, ddof=ddof, eps=whiten_eps, all_reduce=all_reduce)
    return a


def _standard(
    x: Tensor, mask: Tensor, *, ddof: int, eps: float, all_reduce: Callable[[Tensor], Tensor] | None
) -> Tensor:
    m = moments(x, mask, ddof=ddof, all_reduce=all_reduce)
    return torch.where(m.size > 1, m.centred(x, mask) / (m.variance.sqrt() + eps), 0.0)
