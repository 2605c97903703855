"""Logits to what the losses read: the log-prob of the sampled token, and the entropy, without a (B, T, V) temporary."""

from rlprims.logprobs._entropy import entropy_from_logits
from rlprims.logprobs._selected import from_logits

__all__ = ["entropy_from_logits", "from_logits"]
