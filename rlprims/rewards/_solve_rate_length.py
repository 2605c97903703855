"""See :func:`solve_rate_length`."""

import torch

from rlprims.grouping import check_group_ids, group_count, group_mean
from rlprims.layout import sequence_lengths
from rlprims.masking import check_sequences, check_tokens, upcast
from rlprims.types import CuSeqlens, GroupIds, PerSequence, TokenMask


def solve_rate_length(
    scores: PerSequence,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    max_length: int,
    coefficient: float = 0.25,
    correct_above: float = 0.5,
) -> PerSequence:
    """Adaptive length penalty (arXiv:2506.05256), to be added to the score: tokens cost more where the prompt is easy.

    −c max(p, 1/G) l / L with p the share of the group's G responses that are right, l the tokens that the policy
    sampled and L = max_length. Right and wrong responses pay alike.

    Where sources disagree: SkyRL (whose c is the default here) and prime-rl leave 1/G out, so that a prompt that nobody
    solves costs nothing; prime-rl measures length by the longest response of the group.

    Args:
        scores: float (B,); a response is right if its score is above ``correct_above``.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool (B, T) or (N,).
        cu_seqlens: int (B+1,) if packed.
        max_length: L, in tokens.
        coefficient: c, in units of the score: what a response of L tokens costs when all are right.
        correct_above: between the score of a wrong and of a right answer.

    Returns:
        float (B,), at most 0. A response without a token counts in its group as wrong.

    Raises:
        ValueError: shapes or dtypes that do not fit; max_length < 1; coefficient < 0.

    >>> import torch
    >>> m = torch.arange(8) < torch.tensor([[4], [8], [8]])
    >>> solve_rate_length(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 1]), m, max_length=8)
    tensor([-0.0625, -0.1250, -0.2500])
    """
    check_tokens(response_mask, cu_seqlens)
    check_sequences(response_mask, cu_seqlens, scores=scores, group_ids=group_ids)
    check_group_ids(group_ids)
    if max_length < 1 or coefficient < 0:
        raise ValueError(f"max_length={max_length} needs at least 1 and coefficient={coefficient} at least 0")
    lengths = sequence_lengths(response_mask, cu_seqlens)
    dtype = upcast(scores).dtype
    right = (scores > correct_above) & (lengths > 0)
    rate = torch.maximum(group_mean(right.to(dtype), group_ids), 1 / group_count(group_ids).to(dtype))
    return -coefficient * rate * lengths / max_length
