"""See :func:`truncation_penalty`."""

import torch

from rlprims.masking import upcast
from rlprims.types import PerSequence, RowMask


def truncation_penalty(
    scores: PerSequence, truncated: RowMask, *, scale: float = 1.0, penalty: float = 0.0
) -> PerSequence:
    """What a response that did not end by itself loses, to be added to the score.

    The score s of a truncated response becomes c s − p. With c = 1 it is the constant of TRL and NeMo-RL for a missing
    end of sequence; with p = 0 the stop-properly coefficient of OpenRLHF and NeMo-RL, 0 <= c <= 1; and with c = 0 every
    truncated response scores −p, which OpenRLHF writes as a negative coefficient.

    A factor below 1 takes nothing from a wrong answer of score 0, and raises a negative score: give such scores a
    penalty.

    Args:
        scores: float (B,).
        truncated: bool (B,), True if the response reached the limit of its length and not its end.
        scale: c.
        penalty: p, in units of the score.

    Returns:
        float (B,), (c − 1) s − p where truncated, 0 elsewhere.

    Raises:
        ValueError: shapes or dtypes that do not fit; scale outside [0, 1]; penalty < 0; neither is given.

    >>> import torch
    >>> scores, truncated = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([False, True, True])
    >>> truncation_penalty(scores, truncated, penalty=0.5)
    tensor([ 0.0000, -0.5000, -0.5000])
    >>> scores + truncation_penalty(scores, truncated, scale=0.0, penalty=1.0)
    tensor([ 1., -1., -1.])
    """
    if scores.dim() != 1 or truncated.shape != scores.shape or truncated.dtype is not torch.bool:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}, truncated has {tuple(truncated.shape)} and dtype "
            f"{truncated.dtype}: float (B,) and bool (B,)"
        )
    if not 0 <= scale <= 1 or penalty < 0:
        raise ValueError(f"scale={scale} must be in [0, 1] and penalty={penalty} at least 0: it is subtracted")
    if scale == 1 and penalty == 0:
        raise ValueError("scale=1 and penalty=0 change nothing: give one of them another value")
    return torch.where(truncated, (scale - 1) * upcast(scores) - penalty, 0.0)
