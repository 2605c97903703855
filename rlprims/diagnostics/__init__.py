"""What the tensors say of a step.

Each metric is unfinished (a sum with its count, a maximum, moments), so that ranks and micro-batches merge to exactly
what the whole would give: see ``types.merge_metrics``. ``value()`` finishes it. No name says how to reduce it; its type
does. Nothing counted gives 0, and no metric carries a graph.
"""

from rlprims.diagnostics._at_k import best_at_k, pass_at_k
from rlprims.diagnostics._critic import explained_variance
from rlprims.diagnostics._groups import dead_groups
from rlprims.diagnostics._mismatch import sampler_mismatch
from rlprims.diagnostics._policy import divergences, policy_update
from rlprims.diagnostics._rejections import rejections
from rlprims.diagnostics._responses import length_correlation, log_perplexity, responses
from rlprims.diagnostics._shares import nonfinite, share
from rlprims.diagnostics._tokens import token_max, token_mean
from rlprims.diagnostics._weights import weights

__all__ = [
    "best_at_k",
    "dead_groups",
    "divergences",
    "explained_variance",
    "length_correlation",
    "log_perplexity",
    "nonfinite",
    "pass_at_k",
    "policy_update",
    "rejections",
    "responses",
    "sampler_mismatch",
    "share",
    "token_max",
    "token_mean",
    "weights",
]
