"""See :func:`combine`."""

import torch

from rlprims.masking import upcast
from rlprims.types import ComponentScores, PerSequence


def combine(component_scores: ComponentScores, *, weights: tuple[float, ...] | None = None) -> PerSequence:
    """Several rewards into one score, Σ_k w_k s_k; NaN marks a reward that does not apply to that response.

    A NaN is left out of the sum, and the other weights stay as they are (TRL does the same). A response that no reward
    could score is NaN, so that ``filters.finite`` drops its group; a plain sum would call it 0, an ordinary score.

    These are scores, not a term to add to them. ``advantage.gdpo`` takes the components themselves.

    Args:
        component_scores: float (B, K), one column for each reward.
        weights: w_k, one for each reward; None: all 1.

    Returns:
        float (B,).

    Raises:
        ValueError: shapes that do not fit; weights of another number than K.

    >>> import torch
    >>> nan = torch.nan
    >>> combine(torch.tensor([[1.0, 0.5], [1.0, nan], [nan, nan]]), weights=(1.0, 0.2))
    tensor([1.1000, 1.0000,    nan])
    """
    if component_scores.dim() != 2:
        raise ValueError(
            f"component_scores has shape {tuple(component_scores.shape)}, needs (B, K): one column for each reward"
        )
    w = (1.0,) * component_scores.shape[1] if weights is None else weights
    if len(w) != component_scores.shape[1]:
        raise ValueError(
            f"component_scores has {component_scores.shape[1]} columns and weights {len(w)} entries: give one weight "
            "for each reward"
        )
    s = upcast(component_scores)
    unknown = s.isnan()
    total = torch.where(unknown, 0.0, s * torch.tensor(w, dtype=s.dtype, device=s.device)).sum(1)
    return torch.where(unknown.all(1), torch.nan, total)
