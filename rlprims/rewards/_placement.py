"""See :func:`at_last_token`."""

from rlprims.layout import last_token, to_tokens
from rlprims.masking import check_sequences, check_tokens
from rlprims.types import CuSeqlens, PerSequence, PerToken, TokenMask


def at_last_token(scores: PerSequence, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """Outcome reward: each response's score on the last token that the policy sampled, 0 elsewhere.

    A response without a token receives nothing, and nothing is written anywhere else: verl and OpenRLHF write it on the
    last column. The score of such a response still stands in ``scores``.

    Args:
        scores: float (B,).
        response_mask: bool (B, T) or (N,).
        cu_seqlens: int (B+1,) if packed.

    Returns:
        float, like response_mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> at_last_token(torch.tensor([2.0, 3.0]), torch.tensor([[True, True, False], [False, False, False]]))
    tensor([[0., 2., 0.],
            [0., 0., 0.]])
    """
    check_tokens(response_mask, cu_seqlens)
    check_sequences(response_mask, cu_seqlens, scores=scores)
    last = last_token(response_mask, cu_seqlens)
    return to_tokens(scores, last, cu_seqlens)
