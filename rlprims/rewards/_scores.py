"""Terms of a response's score that do not depend on its length: several rewards, a linear map, repetition."""

from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.layout import expand_to_tokens
from rlprims.masking import check_above, check_at_least, check_finite, check_tokens, upcast
from rlprims.types import ComponentScores, CuSeqlens, PerSequence, TokenMask

Responses: TypeAlias = Annotated[Tensor, "int64 (B, T) or (N,)"]


@described
def weighted_score(component_scores: ComponentScores, *, weights: tuple[float, ...] | None = None) -> PerSequence:
    """One score from several rewards, Σ_k w_k s_k; NaN marks a reward that does not apply to that response.

    A NaN is left out of the sum, and the other weights do not change (TRL does the same). A response without any score
    is NaN, so that ``filters.finite_scores`` drops its group; with a plain sum its score would be 0.

    The result is the score itself, not a term to add to it. ``advantage.gdpo`` takes the components.

    >>> nan = torch.nan
    >>> weighted_score(torch.tensor([[1.0, 0.5], [1.0, nan], [nan, nan]]), weights=(1.0, 0.2))
    tensor([1.1000, 1.0000,    nan])
    """
    if component_scores.dim() != 2:
        raise ValueError(f"component_scores has shape {tuple(component_scores.shape)}, expected (B, K) for K rewards")
    count = component_scores.shape[1]
    w = (1.0,) * count if weights is None else weights
    if len(w) != count:
        raise ValueError(f"component_scores has {count} columns and weights has {len(w)} entries, expected as many")
    s = upcast(component_scores)
    unknown = s.isnan()
    total = (torch.where(unknown, 0.0, s) * torch.tensor(w, dtype=s.dtype, device=s.device)).sum(1)
    return torch.where(unknown.all(1), torch.nan, total)


@described
def rescale(
    scores: PerSequence, *, shift: float = 0.0, scale: float = 1.0, low: float = -10.0, high: float = 10.0
) -> PerSequence:
    """A linear map and a clip, as a term: clip((s + shift) · scale) − s.

    It depends only on the score, not on other terms. The bounds are OpenRLHF's; AReaL clips at ±20, NeMo-RL maps one
    range to another. The map does not depend on the batch: a running mean's would depend on the time of sampling.

    Args:
        shift: in units of the score.
        scale: above 0, so that a better response stays better.
        low, high: bounds of the new score, low < high; ±inf for none.

    Returns:
        the new score minus the old one.

    >>> scores = torch.tensor([-40.0, 1.0, 3.0])
    >>> scores + rescale(scores, shift=-1.0, scale=0.5)
    tensor([-10.,   0.,   1.])
    """
    if scores.dim() != 1:
        raise ValueError(f"scores has shape {tuple(scores.shape)}, expected (B,): one per response")
    check_above(0, scale=scale)
    check_finite(shift=shift)
    if not low < high:
        raise ValueError(f"low={low} and high={high}, expected low < high")
    old = upcast(scores)
    return ((old + shift) * scale).clamp(low, high) - old


@described
def repetition_penalty(
    responses: Responses,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    ngram: int = 3,
    penalty_factor: float = 1.0,
) -> PerSequence:
    """Repetition penalty (arXiv:2502.03373), appendix C.2, to be added to the score: −f (1 − distinct / all n-grams).

    N-grams are of the tokens that the policy sampled, in their order; masked tokens are skipped. TRL counts the same
    way. The n-grams are counted by sorting them, so the count is exact.

    Args:
        responses: token ids.
        ngram: n, in tokens; at least 1.

    Returns:
        float32 (B,), between −f and 0; 0 for a response of fewer than n tokens.

    >>> ids = torch.tensor([[1, 2, 3, 4, 0], [5, 5, 5, 5, 5]])
    >>> repetition_penalty(ids, torch.tensor([[True] * 4 + [False], [True] * 5]), ngram=2)
    tensor([-0.0000, -0.7500])
    """
    check_tokens(response_mask, cu_seqlens, responses=responses)
    if responses.is_floating_point():
        raise ValueError(f"responses has dtype {responses.dtype}, expected integers")
    check_at_least(1, ngram=ngram)
    check_at_least(0, penalty_factor=penalty_factor)
    rows = response_mask.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    row = expand_to_tokens(torch.arange(rows, device=responses.device), response_mask, cu_seqlens).flatten()
    # Valid tokens come first, in their order. All other tokens get a number that is not a row number.
    valid = response_mask.flatten()
    order = (~valid).long().argsort(stable=True)
    row, tokens = torch.where(valid, row, rows)[order], responses.flatten().long()[order]
    position = torch.arange(tokens.shape[0], device=tokens.device)
    # The n-gram that begins at each position, as columns: its row and its tokens. It must end in the same row.
    is_ngram = (row < rows) & (row == row.roll(1 - ngram)) & (position <= tokens.shape[0] - ngram)
    row = torch.where(is_ngram, row, rows)
    columns = [row, *(tokens.roll(-k) for k in range(ngram))]
    # Sorted by all columns, equal n-grams are neighbours: an n-gram is counted where it differs from the one before.
    order = position
    for column in columns:
        order = order[column[order].argsort(stable=True)]
    columns = [column[order] for column in columns]
    is_first = torch.stack([column != column.roll(1) for column in columns]).any(0) | (position == 0)
    zeros = torch.zeros(rows + 1, dtype=torch.int64, device=tokens.device)
    distinct = zeros.index_add(0, columns[0], is_first.long())[:rows].float()
    total = zeros.index_add(0, row, is_ngram.long())[:rows].float()
    return -penalty_factor * (1 - distinct / total.clamp(min=1)) * (total > 0)
