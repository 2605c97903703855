"""Logits, or hidden states and the LM head, to what the losses read: a sampled token's log-prob, and the entropy.

:func:`from_logits`, :func:`entropy_from_logits`, or :func:`from_logits_with_entropy` for both, of logits (B, T, V).
Where a vocabulary is large, take :func:`from_hidden`, or :func:`fused_loss` for a token-wise loss at once: in eager
code their kernels never hold the logits of all tokens.
"""

from rlprims.logprobs._from_hidden import from_hidden
from rlprims.logprobs._from_logits import LogProbs, entropy_from_logits, from_logits, from_logits_with_entropy
from rlprims.logprobs._fused_loss import FusedLoss, fused_loss

__all__ = [
    "FusedLoss",
    "LogProbs",
    "entropy_from_logits",
    "from_hidden",
    "from_logits",
    "from_logits_with_entropy",
    "fused_loss",
]
