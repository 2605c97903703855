"""Corrections of the gap between the policy that sampled and the policy that the trainer computes.

Each function returns :class:`Weights`, one factor per token of the loss. Importance weights correct the gap. Gates are
0 or 1 and drop the tokens where the gap is too large. To use both, multiply them: ``tis(...) * veto(...)``.
:func:`fipo` corrects no gap: it weights a token by how the policy's updates have changed the probabilities of the
tokens after it.
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
