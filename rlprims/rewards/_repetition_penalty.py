"""See :func:`repetition_penalty`."""

from typing import Annotated

import torch
from torch import Tensor

from rlprims.layout import sequence_ids
from rlprims.masking import check_tokens
from rlprims.types import CuSeqlens, PerSequence, TokenMask

Responses = Annotated[Tensor, "int64 (B, T) or (N,)"]


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
    way. The n-grams are counted by sorting them, so the count is exact: no hashing.

    Args:
        responses: int64 (B, T) or (N,), token ids from 0 to below 2³².
        response_mask: bool, like responses.
        cu_seqlens: int (B+1,) if packed.
        ngram: n, in tokens.
        penalty_factor: f, in units of the score.

    Returns:
        float32 (B,), between −f and 0; 0 for a response of fewer than n tokens.

    Raises:
        ValueError: shapes or dtypes that do not fit; ngram < 1; penalty_factor < 0.

    >>> import torch
    >>> ids = torch.tensor([[1, 2, 3, 4, 0], [5, 5, 5, 5, 5]])
    >>> repetition_penalty(ids, torch.tensor([[True] * 4 + [False], [True] * 5]), ngram=2)
    tensor([-0.0000, -0.7500])
    """
    check_tokens(response_mask, cu_seqlens, responses=responses)
    if responses.is_floating_point():
        raise ValueError(f"responses has dtype {responses.dtype}, needs integers")
    if ngram < 1 or penalty_factor < 0:
        raise ValueError(f"ngram={ngram} needs at least 1 and penalty_factor={penalty_factor} at least 0")
    rows = len(response_mask) if cu_seqlens is None else len(cu_seqlens) - 1
    if cu_seqlens is None:
        owner = torch.arange(rows, device=responses.device)[:, None].expand(responses.shape).flatten()
    else:
        owner = sequence_ids(cu_seqlens, len(responses))
    sampled = response_mask.flatten()
    # Sampled tokens first, in their order; the owner of all others is no row, and sorts last.
    order = sampled.logical_not().argsort(stable=True)
    tokens = responses.flatten()[order].long()
    owner = torch.where(sampled, owner, rows)[order]
    place = torch.arange(len(tokens), device=tokens.device)
    whole = (owner < rows) & (owner == owner.roll(1 - ngram)) & (place <= len(tokens) - ngram)
    columns = [torch.where(whole, owner, rows)] + [tokens.roll(-k) for k in range(ngram)]
    # Two columns in one number. Sorted stably by each number in turn, equal n-grams become neighbours.
    keys = [(a << 32) | b for a, b in zip(columns[::2], columns[1::2], strict=False)] + columns[len(columns) // 2 * 2 :]
    ranking = place
    for key in keys:
        ranking = ranking[key[ranking].argsort(stable=True)]
    new = place == 0
    for key in keys:
        ranked = key[ranking]
        new = new | (ranked != ranked.roll(1))
    zeros = torch.zeros(rows + 1, device=tokens.device)
    distinct = zeros.index_add(0, columns[0][ranking], new.float())[:rows]
    total = zeros.index_add(0, columns[0], whole.float())[:rows]
    return -penalty_factor * (1 - distinct / total.clamp(min=1)) * (total > 0)
