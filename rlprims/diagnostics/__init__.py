"""Metrics of a training step, computed from its tensors.

Each metric is a sum with its count, a maximum, or moments, so that the metrics of ranks and micro-batches merge to
exactly the metric of the whole batch: see ``types.merge_metrics``. ``value()`` gives the number. The metric's type, not
its name, defines how it is merged. If nothing was counted the value is 0. Metrics have no gradient.
"""

from rlprims._near import suggest_attributes
from rlprims.diagnostics._policy import divergences, ratio_stats, sampler_mismatch, staleness, support_mass
from rlprims.diagnostics._responses import (
    best_at_k, dead_groups, fraction, length_correlation, log_perplexity, majority_at_k, pass_at_k, response_stats,
)  # fmt: skip
from rlprims.diagnostics._tokens import (
    explained_variance, mean_over_tokens, nonfinite, rejections, token_max, weight_stats,
)  # fmt: skip

__all__ = [
    "best_at_k", "dead_groups", "divergences", "explained_variance", "fraction", "length_correlation",
    "log_perplexity", "majority_at_k", "mean_over_tokens", "nonfinite", "pass_at_k", "ratio_stats", "rejections",
    "response_stats", "sampler_mismatch", "staleness", "support_mass", "token_max", "weight_stats",
]  # fmt: skip

suggest_attributes(__name__, __all__)
