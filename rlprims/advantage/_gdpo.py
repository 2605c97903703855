"""GDPO: several rewards, each normalized in its group, then summed and whitened over the batch."""

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.advantage._group import Singleton, tokens_of_valid_rows, z_scores
from rlprims.grouping import safe_sqrt
from rlprims.layout import sequence_lengths, to_tokens
from rlprims.masking import batch_moments, check_choice, check_deviation, check_tokens, upcast, zero_outside
from rlprims.types import ComponentScores, CuSeqlens, GroupIds, PerToken, RowMask, TokenMask

WhitenOver: TypeAlias = Literal["responses", "tokens", "none"]


@described
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
    singleton: Singleton = "zero",
    tolerance: float = 1e-6,
    whiten_over: WhitenOver = "responses",
    whiten_eps: float = 1e-6,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerToken:
    """Group reward-decoupled normalization (arXiv:2601.05242): each reward is normalized separately, then summed.

    With s_ik the score of response i by reward k: z_ik = (s_ik − μ_k) / (σ_k + ε) over the group, x_i = Σ_k w_k z_ik,
    and A_i = (x_i − μ) / (σ + ε') over the responses of the batch. The weights do not depend on the scale of a reward.

    Where sources disagree: the last step is over responses in the paper, TRL, ms-swift and NeMo-RL, and over tokens in
    verl 0.9 (``whiten_over="tokens"``), where long responses have more weight. ε and ε' are 1e-4 in TRL, 1e-8 in
    ms-swift; NeMo-RL has no ε'. A filter on groups must test every component: a group whose sums are equal still has a
    gradient. Rewards per token are not used, so a KL in the reward has no effect.

    Args:
        tolerance: reward k is constant in a group if max − min <= tolerance · max(1, |s|), and z_k is 0 there.
        whiten_over: whether μ and σ of the last step are over responses or tokens; "none": no last step.
        whiten_eps: ε', at least 0.

    >>> s = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 10.0], [0.0, 20.0]])
    >>> gdpo(s, torch.tensor([0, 0, 1, 1]), torch.ones(4, 1, dtype=torch.bool), weights=(1.0, 0.5)).T
    tensor([[ 1.0954, -1.0954,  0.5477, -0.5477]])
    """
    check_choice("singleton", singleton, Singleton)
    check_choice("whiten_over", whiten_over, WhitenOver)
    check_deviation(ddof, eps=eps, whiten_eps=whiten_eps)
    check_tokens(response_mask, cu_seqlens)
    mask = tokens_of_valid_rows(response_mask, group_ids, cu_seqlens, valid_rows)
    weights = _checked_weights(component_scores, group_ids, weights)
    is_present = sequence_lengths(mask, cu_seqlens) > 0
    scores = torch.where(is_present[:, None], upcast(component_scores), 0.0)
    options = {"normalize_std": normalize_std, "ddof": ddof, "eps": eps, "singleton": singleton, "tolerance": tolerance}
    x = scores.new_zeros(scores.shape[0])
    for weight, s in zip(weights, scores.unbind(1), strict=True):
        x = x + weight * z_scores(s, group_ids, valid_rows, **options)
    if whiten_over == "responses":
        rows = torch.ones_like(is_present) if valid_rows is None else valid_rows
        x = _whiten(x, rows, ddof=ddof, eps=whiten_eps, all_reduce=all_reduce)
    a = to_tokens(x, mask, cu_seqlens)
    return _whiten(a, mask, ddof=ddof, eps=whiten_eps, all_reduce=all_reduce) if whiten_over == "tokens" else a


def _whiten(x: Tensor, mask: Tensor, *, ddof: int, eps: float, all_reduce: Callable[[Tensor], Tensor] | None) -> Tensor:
    """(x − μ) / (σ + ε). :func:`whiten` divides by sqrt(σ² + ε) instead."""
    moments = batch_moments(x, mask, ddof=ddof, all_reduce=all_reduce)
    denominator = (safe_sqrt(moments.variance) + eps).to(x.dtype)
    is_defined = denominator != 0
    return zero_outside(moments.centred / torch.where(is_defined, denominator, 1.0), mask & is_defined)


def _checked_weights(
    component_scores: ComponentScores, group_ids: GroupIds, weights: tuple[float, ...] | None
) -> tuple[float, ...]:
    if component_scores.dim() != 2 or component_scores.shape[0] != group_ids.shape[0]:
        raise ValueError(
            f"component_scores has shape {tuple(component_scores.shape)}, expected ({group_ids.shape[0]}, K): one row "
            "per response, one column per reward"
        )
    weights = (1.0,) * component_scores.shape[1] if weights is None else weights
    if len(weights) != component_scores.shape[1]:
        raise ValueError(
            f"weights has {len(weights)} entries, expected {component_scores.shape[1]}: one for each column of "
            "component_scores"
        )
    return weights
