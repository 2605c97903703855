"""See :func:`relative_length`."""

import torch

from rlprims.grouping import check_group_ids, group_bounds
from rlprims.layout import sequence_lengths
from rlprims.masking import check_sequences, check_tokens, upcast
from rlprims.types import CuSeqlens, GroupIds, PerSequence, TokenMask


def relative_length(
    scores: PerSequence,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    weight: float = 1.0,
    correct_above: float = 0.5,
) -> PerSequence:
    """Length reward of Kimi k1.5 (arXiv:2501.12599), section 2.3.3, to be added to the score.

    With l the tokens that the policy sampled, λ = 0.5 − (l − min) / (max − min) over the group: the shortest response
    gains a half, the longest loses a half. A right answer receives w λ and a wrong one w min(0, λ), so that being
    short and wrong gains nothing. In a group of one length every λ is 0.

    The paper warms up without it and adds it later: early on it stops the answers from growing at all.

    Args:
        scores: float (B,); a response is right if its score is above ``correct_above``.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool (B, T) or (N,).
        cu_seqlens: int (B+1,) if packed.
        weight: w, in units of the score.
        correct_above: between the score of a wrong and of a right answer.

    Returns:
        float (B,), between −w/2 and w/2. A response without a token receives 0 and is not the shortest.

    Raises:
        ValueError: shapes or dtypes that do not fit; weight < 0.

    >>> import torch
    >>> m = torch.arange(8) < torch.tensor([[2], [4], [6], [2]])
    >>> relative_length(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.int64), m)
    tensor([ 0.5000,  0.0000, -0.5000,  0.0000])
    """
    check_tokens(response_mask, cu_seqlens)
    check_sequences(response_mask, cu_seqlens, scores=scores, group_ids=group_ids)
    check_group_ids(group_ids)
    if weight < 0:
        raise ValueError(f"weight={weight} must not be negative: it would reward length")
    lengths = sequence_lengths(response_mask, cu_seqlens)
    present = lengths > 0
    length = lengths.to(upcast(scores).dtype)
    shortest, longest = group_bounds(length, group_ids, present)
    spread = longest - shortest
    share = 0.5 - (length - shortest) / spread.clamp(min=1)
    share = torch.where(scores > correct_above, share, share.clamp(max=0.0))
    return torch.where(present & (spread > 0), weight * share, 0.0)
