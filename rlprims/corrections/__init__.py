"""Corrections of the gap between the policy that sampled and the policy that the trainer computes.

Each returns :class:`Weights`, one factor per token of the loss. Importance weights account for the gap; gates, which
are 0 or 1, leave out where it is too large. They multiply: ``tis(...) * veto(...)``. :func:`fipo` weighs tokens by
what the policy's updates have done to those after them, and accounts for no gap.
"""

from rlprims.corrections._gates import opsm, rejection
from rlprims.corrections._importance_weights import batch_normalized, importance_weights, replace_nonfinite
from rlprims.corrections._influence import fipo
from rlprims.corrections._presets import geometric, icepop, mis, seq_mask_tis, tis, veto
from rlprims.corrections._weights import Weights

__all__ = [
    "Weights",
    "batch_normalized",
    "fipo",
    "geometric",
    "icepop",
    "importance_weights",
    "mis",
    "opsm",
    "rejection",
    "replace_nonfinite",
    "seq_mask_tis",
    "tis",
    "veto",
]
