"""Corrections of the gap between the policy that sampled and the policy that the trainer computes.

Each function returns :class:`Weights`, one factor per token of the loss. Importance weights correct the gap. Gates, 0
or 1, drop tokens where it is too large. To use both, multiply them: ``tis(...) * token_veto(...)``. :func:`fipo`
corrects no gap: it weights a token by the change of the probabilities of the tokens after it.
"""

from rlprims._near import suggest_attributes
from rlprims.corrections._gates import opsm, rejection
from rlprims.corrections._presets import geometric_gate, icepop, mis, seq_mask_tis, tis, token_veto
from rlprims.corrections._weights import Weights, batch_normalized, fipo, importance_weights, replace_nonfinite

__all__ = [
    "Weights", "batch_normalized", "fipo", "geometric_gate", "icepop", "importance_weights", "mis", "opsm",
    "rejection", "replace_nonfinite", "seq_mask_tis", "tis", "token_veto",
]  # fmt: skip

suggest_attributes(__name__, __all__)
