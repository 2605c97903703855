"""See :func:`cosine_length`."""

import math

import torch

from rlprims.layout import sequence_lengths
from rlprims.masking import check_sequences, check_tokens, upcast
from rlprims.types import CuSeqlens, PerSequence, TokenMask


def cosine_length(
    scores: PerSequence,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    max_length: int,
    correct_short: float = 1.0,
    correct_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    correct_above: float = 0.5,
) -> PerSequence:
    """Cosine reward (arXiv:2502.03373), appendix C.1, as a term: what to add to a score so that it becomes this one.

    The new score is long + (short − long) (1 + cos(π min(l / L, 1))) / 2, with the two values of a right or of a wrong
    answer, l the tokens that the policy sampled and L = max_length: right answers should be short, wrong ones may think
    longer. Beyond L it stays at ``long``; the paper's own value for a response that was cut off is
    :func:`~rlprims.rewards.truncation_penalty`. The defaults are TRL's ``max_value_correct``, ``min_value_correct``,
    ``min_value_wrong`` and ``max_value_wrong``, in this order.

    Args:
        scores: float (B,); a response is right if its score is above ``correct_above``.
        response_mask: bool (B, T) or (N,).
        cu_seqlens: int (B+1,) if packed.
        max_length: L, in tokens.
        correct_short, correct_long: new score of a right answer of 0 and of L tokens.
        wrong_short, wrong_long: new score of a wrong answer of 0 and of L tokens.
        correct_above: between the score of a wrong and of a right answer.

    Returns:
        float (B,), the new score less the old. A response without a token receives 0.

    Raises:
        ValueError: shapes or dtypes that do not fit; max_length < 1.

    >>> import torch
    >>> m = torch.arange(8) < torch.tensor([[4], [4], [8]])
    >>> scores = torch.tensor([1.0, 0.0, 1.0])
    >>> scores + cosine_length(scores, m, max_length=8)
    tensor([ 0.7500, -0.7500,  0.5000])
    """
    check_tokens(response_mask, cu_seqlens)
    check_sequences(response_mask, cu_seqlens, scores=scores)
    if max_length < 1:
        raise ValueError(f"max_length={max_length} needs at least 1: the tokens at which the long value is reached")
    lengths = sequence_lengths(response_mask, cu_seqlens)
    present = lengths > 0
    old = torch.where(present, upcast(scores), 0.0)
    shortness = (1 + torch.cos(math.pi * (lengths.to(old.dtype) / max_length).clamp(max=1.0))) / 2
    right = correct_long + (correct_short - correct_long) * shortness
    wrong = wrong_long + (wrong_short - wrong_long) * shortness
    return torch.where(present, torch.where(old > correct_above, right, wrong) - old, 0.0)
