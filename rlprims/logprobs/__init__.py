"""Logits, or hidden states and the LM head, to what the losses read: a sampled token's log-prob, and the entropy.

No (B, T, V) temporary is made of logits that are there (:func:`from_logits`, :func:`entropy_from_logits`, or
:func:`from_logits_with_entropy` for both in one sweep), and none at all from hidden states: :func:`from_hidden`, or
:func:`fused_loss` for a token-wise loss at once.
"""

from rlprims.logprobs._entropy import entropy_from_logits
from rlprims.logprobs._from_hidden import LogProbs, from_hidden
from rlprims.logprobs._fused_loss import FusedLoss, fused_loss
from rlprims.logprobs._selected import from_logits
from rlprims.logprobs._with_entropy import from_logits_with_entropy

__all__ = [
    "FusedLoss",
    "LogProbs",
    "entropy_from_logits",
    "from_hidden",
    "from_logits",
    "from_logits_with_entropy",
    "fused_loss",
]
