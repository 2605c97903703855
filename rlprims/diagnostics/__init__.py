"""Metrics of a training step, computed from its tensors.

Each metric is a sum with its count, a maximum, or moments, so that the metrics of ranks and micro-batches merge to
exactly the metric of the whole batch: see ``types.merge_metrics``. ``value()`` gives the number. The metric's type, not
its name, defines how it is merged. If nothing was counted the value is 0. Metrics have no gradient.
"""

from rlprims.diagnostics._majority import majority_at_k
from rlprims.diagnostics._policy import divergences, kept_mass, policy_update, sampler_mismatch, staleness
from rlprims.diagnostics._responses import (
    best_at_k,
    dead_groups,
    length_correlation,
    log_perplexity,
    pass_at_k,
    responses,
    share,
)
from rlprims.diagnostics._tokens import explained_variance, nonfinite, rejections, token_max, token_mean, weights

__all__ = [
    "best_at_k",
    "dead_groups",
    "divergences",
    "explained_variance",
    "kept_mass",
    "length_correlation",
    "log_perplexity",
    "majority_at_k",
    "nonfinite",
    "pass_at_k",
    "policy_update",
    "rejections",
    "responses",
    "sampler_mismatch",
    "share",
    "staleness",
    "token_max",
    "token_mean",
    "weights",
]
