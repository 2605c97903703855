"""Logits, or hidden states and the LM head, to what the losses read: a sampled token's log-prob, and the entropy.

:func:`from_logits`, :func:`entropy_from_logits`, or :func:`from_logits_with_entropy` for both, of logits (B, T, V).
Where a vocabulary is large, take :func:`from_hidden`, or :func:`fused_loss` for a token-wise loss at once: in eager
code their kernels never hold the logits of all tokens.

**Truncated sampling.** With top-k, top-p or min-p a sampler draws from a set K of the vocabulary and renormalizes. All
of these functions take that set of each token as ``kept``, a :class:`rlprims.types.Kept`, and then compute within it:
log π_K(a) = z_a − logsumexp_{v∈K} z_v, and the entropy over K (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). Give them
for the policy, the old policy and the reference alike. Without them the ratio to the sampler's log-probs is S =
Σ_{v∈K} π_v on policy, where it should be 1; ``diagnostics.kept_mass`` is its mean. The sets are those that the sampler
recorded. A trainer that filters its own logits again may lose the token that was drawn, by rounding.

>>> import torch
>>> from rlprims.types import Kept
>>> logits, tokens = torch.tensor([[4.0, 3.0, 1.0], [4.0, 3.0, 1.0]]).log(), torch.tensor([0, 0])
>>> kept = Kept(ids=torch.tensor([0, 1]), offsets=torch.tensor([0, 2, 2]))  # the second token: drawn from all
>>> from_logits(logits, tokens, kept).exp()
tensor([0.5714, 0.5000])
>>> from_logits(logits, tokens).exp()
tensor([0.5000, 0.5000])
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
