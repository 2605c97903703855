"""Objectives to minimize, per token; and the aggregations that make a scalar of them.

A loss, its aggregation and its diagnostics are three functions. Losses return one number per token, 0 outside the mask;
``loss = losses.token_mean(losses.clipped_surrogate(...), response_mask)``. Gradients flow into ``log_probs``,
``new_values`` and ``entropies`` only: everything else is a constant, attached to a graph or not.

A policy loss whose ratio is to the policy at the start of the step asks for ``old_log_probs``; one whose paper puts the
ratio to the policy that sampled asks for ``rollout_log_probs``, and then needs no :func:`importance_weights`.
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
from rlprims.losses._asymre import asymre
from rlprims.losses._cispo import cispo
from rlprims.losses._clipped_surrogate import clipped_surrogate
from rlprims.losses._decoupled_ppo import decoupled_ppo
from rlprims.losses._dppo import dppo
from rlprims.losses._entropy import entropy
from rlprims.losses._gmpo import gmpo
from rlprims.losses._gppo import gppo
from rlprims.losses._gspo import gspo, gspo_token
from rlprims.losses._importance_weights import importance_weights
from rlprims.losses._kl import kl
from rlprims.losses._opmd import opmd
from rlprims.losses._reinforce import reinforce
from rlprims.losses._sapo import sapo
from rlprims.losses._topr import topr
from rlprims.losses._value import value
from rlprims.losses._vespo import vespo

__all__ = [
    "asymre",
    "cispo",
    "clipped_surrogate",
    "count_totals",
    "decoupled_ppo",
    "dppo",
    "entropy",
    "gmpo",
    "gppo",
    "gspo",
    "gspo_token",
    "importance_weights",
    "kl",
    "opmd",
    "prompt_token_mean",
    "reinforce",
    "sapo",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "token_mean",
    "token_sum",
    "topr",
    "value",
    "vespo",
]
