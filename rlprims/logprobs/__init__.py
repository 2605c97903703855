"""Log-probs of sampled tokens, and entropies, from logits, or from hidden states and the LM head.

For logits (B, T, V) use :func:`from_logits`, :func:`entropy_from_logits`, or :func:`from_logits_with_entropy` for both.
For a large vocabulary use :func:`from_hidden`, :func:`fused_loss` for a token-wise loss, or :func:`fused_full_kl` for a
divergence from a teacher: in eager code their kernels never have the logits of all tokens in memory.

**Truncated sampling.** With top-k, top-p or min-p a sampler draws from a set K of the vocabulary and renormalizes. All
of these functions take the set of each token as ``kept``, a :class:`rlprims.types.SamplingSupport`, and then compute
within it: log π_K(a) = z_a − logsumexp_{v∈K} z_v, and the entropy over K (DeepSeek-V3.2, arXiv:2512.02556, section
3.1). Pass the sets for the policy, the old policy and the reference. Without them the ratio to the sampler's log-probs
is S = Σ_{v∈K} π_v on policy, where it should be 1; ``diagnostics.support_mass`` is its mean. Use the sets that the
sampler recorded: if the trainer filters its own logits again, rounding may remove the token that was drawn.

>>> import torch
>>> from rlprims.types import SamplingSupport
>>> logits, tokens = torch.tensor([[4.0, 3.0, 1.0], [4.0, 3.0, 1.0]]).log(), torch.tensor([0, 0])
>>> kept = SamplingSupport(ids=torch.tensor([0, 1]), offsets=torch.tensor([0, 2, 2]))  # the second: from all
>>> from_logits(logits, tokens, kept).exp()
tensor([0.5714, 0.5000])
>>> from_logits(logits, tokens).exp()
tensor([0.5000, 0.5000])
"""

from rlprims.logprobs._from_hidden import from_hidden
from rlprims.logprobs._from_logits import LogProbs, entropy_from_logits, from_logits, from_logits_with_entropy
from rlprims.logprobs._fused_loss import FusedLoss, fused_full_kl, fused_loss

__all__ = [
    "FusedLoss", "LogProbs", "entropy_from_logits", "from_hidden", "from_logits", "from_logits_with_entropy",
    "fused_full_kl", "fused_loss",
]  # fmt: skip
