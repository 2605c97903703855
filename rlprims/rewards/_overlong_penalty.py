"""See :func:`overlong_penalty`."""

from rlprims.layout import sequence_lengths
from rlprims.masking import check_tokens
from rlprims.types import CuSeqlens, PerSequence, TokenMask


def overlong_penalty(
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    max_length: int,
    buffer_length: int,
    penalty_factor: float = 1.0,
) -> PerSequence:
    """Soft overlong punishment, DAPO (Yu et al. 2025, arXiv:2503.14476), eq. 13, to be added to the score.

    With l the tokens that the policy sampled, L = max_length, C = buffer_length, f = penalty_factor:
    0 for l <= L − C; f (L − C − l) / C up to L; −f beyond (verl, NeMo-RL and AReaL go on falling). Tool tokens do not
    count: the policy did not write them. C = 0 is the step from 0 to −f after L.

    Keep the group filter on the accuracy when this is added to the score: in a group that is wrong throughout, the
    penalty is all that differs, and the policy learns to be short.

    Args:
        response_mask: bool (B, T) or (N,).
        cu_seqlens: int (B+1,) if packed.
        max_length: L, in tokens.
        buffer_length: C, in tokens.
        penalty_factor: f, in units of the score.

    Returns:
        float32 (B,), between −f and 0.

    Raises:
        ValueError: shapes or dtypes that do not fit; buffer_length outside [0, max_length]; penalty_factor < 0.

    >>> import torch
    >>> m = torch.arange(12) < torch.tensor([6, 7, 10, 12])[:, None]
    >>> overlong_penalty(m, max_length=10, buffer_length=4)
    tensor([-0.0000, -0.2500, -1.0000, -1.0000])
    """
    check_tokens(response_mask, cu_seqlens)
    if not 0 <= buffer_length <= max_length or max_length == 0:
        raise ValueError(f"buffer_length={buffer_length} must be in [0, max_length={max_length}], max_length above 0")
    if penalty_factor < 0:
        raise ValueError(f"penalty_factor={penalty_factor} must not be negative: it is the size of the penalty")
    exceeds = (sequence_lengths(response_mask, cu_seqlens) - (max_length - buffer_length)).float()
    depth = exceeds / buffer_length if buffer_length > 0 else (exceeds > 0).float()
    return -penalty_factor * depth.clamp(0.0, 1.0)
