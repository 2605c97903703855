"""Objectives to minimize, per token; and the aggregations that make a scalar of them.

A loss, its aggregation and its diagnostics are three functions. Losses return one number per token, 0 outside the mask;
``loss = losses.token_mean(losses.clipped_surrogate(...), response_mask)``. Gradients flow into ``log_probs``,
``new_values`` and ``entropies`` only: everything else is a constant, attached to a graph or not.
"""

from rlprims.losses._aggregation import (
    count_totals,
    prompt_token_mean,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    token_sum,
)
from rlprims.losses._clipped_surrogate import clipped_surrogate
from rlprims.losses._entropy import entropy
from rlprims.losses._kl import kl
from rlprims.losses._reinforce import reinforce
from rlprims.losses._value import value

__all__ = [
    "clipped_surrogate",
    "count_totals",
    "entropy",
    "kl",
    "prompt_token_mean",
    "reinforce",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "token_mean",
    "token_sum",
    "value",
]
