"""See :func:`rescale`."""

from rlprims.masking import upcast
from rlprims.types import PerSequence


def rescale(
    scores: PerSequence, *, shift: float = 0.0, scale: float = 1.0, low: float = -10.0, high: float = 10.0
) -> PerSequence:
    """A linear map and a clip, as a term: what to add to a score so that it becomes clip((s + shift) · scale).

    It sees the score alone and none of the other terms. The bounds are OpenRLHF's; AReaL clips at ±20, NeMo-RL maps one
    range onto another. They do not depend on the batch: a running mean would make the reward of a response depend on
    when it was sampled.

    Args:
        scores: float (B,).
        shift: in units of the score.
        scale: above 0, so that what was better stays better.
        low, high: bounds of the new score; ±inf for none.

    Returns:
        float (B,), the new score less the old.

    Raises:
        ValueError: shapes that do not fit; scale <= 0; low not below high.

    >>> import torch
    >>> scores = torch.tensor([-40.0, 1.0, 3.0])
    >>> scores + rescale(scores, shift=-1.0, scale=0.5)
    tensor([-10.,   0.,   1.])
    """
    if scores.dim() != 1:
        raise ValueError(f"scores has shape {tuple(scores.shape)}, needs (B,): one per response")
    if scale <= 0 or not low < high:
        raise ValueError(f"scale={scale} must be above 0, and low={low} below high={high}")
    old = upcast(scores)
    return ((old + shift) * scale).clamp(low, high) - old
