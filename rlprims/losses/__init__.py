"""Objectives to minimize, per token; and the aggregations that make a scalar of them.

A loss, its aggregation and its diagnostics are three functions. Losses return one number per token, 0 outside the mask;
``loss = losses.token_mean(losses.clipped_surrogate(...), response_mask)``. Gradients flow into ``log_probs``,
``logits``, ``new_values`` and ``entropies`` only: everything else is a constant, attached to a graph or not.

A policy loss whose ratio is to the policy at the start of the step asks for ``old_log_probs``; one whose paper puts the
ratio to the policy that sampled asks for ``rollout_log_probs``, and then needs no
:func:`rlprims.corrections.importance_weights`.

Those of preference (:func:`dpo`, :func:`ipo`, :func:`kto`, :func:`orpo`, :func:`simpo`) read one log-prob for each
response and return one number for each pair or response, whose mean is the loss.
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
from rlprims.losses._aspo import aspo
from rlprims.losses._asymre import asymre
from rlprims.losses._cispo import cispo
from rlprims.losses._clipped_surrogate import clipped_surrogate
from rlprims.losses._decoupled_ppo import decoupled_ppo
from rlprims.losses._dpo import dpo
from rlprims.losses._dppo import dppo
from rlprims.losses._entropy import entropy
from rlprims.losses._full_kl import full_kl, jsd
from rlprims.losses._gmpo import gmpo
from rlprims.losses._gppo import gppo
from rlprims.losses._gspo import gspo, gspo_token
from rlprims.losses._ipo import ipo
from rlprims.losses._kl import kl, weighted_kl
from rlprims.losses._kto import kto
from rlprims.losses._nll import nll
from rlprims.losses._opmd import opmd
from rlprims.losses._orpo import orpo
from rlprims.losses._reinforce import reinforce
from rlprims.losses._sampled_reverse_kl import sampled_reverse_kl
from rlprims.losses._sapo import sapo
from rlprims.losses._simpo import simpo
from rlprims.losses._topk_kl import topk_kl
from rlprims.losses._topr import topr
from rlprims.losses._tv_symmetric import tv_symmetric
from rlprims.losses._value import value
from rlprims.losses._vespo import vespo

__all__ = [
    "aspo",
    "asymre",
    "cispo",
    "clipped_surrogate",
    "count_totals",
    "decoupled_ppo",
    "dpo",
    "dppo",
    "entropy",
    "full_kl",
    "gmpo",
    "gppo",
    "gspo",
    "gspo_token",
    "ipo",
    "jsd",
    "kl",
    "kto",
    "nll",
    "opmd",
    "orpo",
    "prompt_token_mean",
    "reinforce",
    "sampled_reverse_kl",
    "sapo",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "simpo",
    "token_mean",
    "token_sum",
    "topk_kl",
    "topr",
    "tv_symmetric",
    "value",
    "vespo",
    "weighted_kl",
]
