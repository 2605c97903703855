"""Objectives to minimize, per token; and the aggregations that make a scalar of them.

A loss, its aggregation and its diagnostics are three functions. Losses return one number per token, 0 outside the mask;
``loss = losses.token_mean(losses.clipped_surrogate(...), response_mask)``. Gradients flow into ``log_probs``,
``logits``, ``topk_log_probs``, ``new_values`` and ``entropies`` only: everything else is a constant, attached to a
graph or not. A loss with the attribute ``token_wise`` computes each token's number from that token's inputs only.

A policy loss whose ratio is to the policy at the start of the step asks for ``old_log_probs``; one whose paper puts the
ratio to the policy that sampled asks for ``rollout_log_probs``, and then needs no
:func:`rlprims.corrections.importance_weights`.

Preference losses (:func:`dpo`, :func:`f_dpo`, :func:`robust_dpo`, :func:`ipo`, :func:`hinge`, :func:`exo`, :func:`nca`,
:func:`bco`, :func:`sppo_hard`, :func:`apo_zero`, :func:`apo_down`, :func:`discopop`, :func:`kto`, :func:`orpo`,
:func:`simpo`) and :func:`implicit_reward` read one log-prob for each response, :func:`bradley_terry` one score, and
return one number for each pair or response, whose mean is the loss.
"""

from rlprims.losses._aggregation import (
    count_totals,
    prompt_token_mean,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    token_sum,
    trajectory_mean,
)
from rlprims.losses._clipped import aspo, clipped_surrogate, decoupled_ppo, gppo, sapo
from rlprims.losses._distillation import full_kl, jsd, topk_kl
from rlprims.losses._kl import kl, sampled_reverse_kl, weighted_kl
from rlprims.losses._preference import dpo, implicit_reward, ipo, kto, orpo, simpo
from rlprims.losses._preference_pairs import (
    apo_down,
    apo_zero,
    bco,
    bradley_terry,
    discopop,
    exo,
    f_dpo,
    hinge,
    nca,
    robust_dpo,
    sppo_hard,
)
from rlprims.losses._sequence import gmpo, gspo, gspo_token, opmd
from rlprims.losses._supervised import chord_phi, dft, entropy, luffy, nll
from rlprims.losses._trust_region import dppo, tv_symmetric
from rlprims.losses._value import value
from rlprims.losses._weighted import asymre, cispo, reinforce, topr, vespo

__all__ = [
    "apo_down",
    "apo_zero",
    "aspo",
    "asymre",
    "bco",
    "bradley_terry",
    "chord_phi",
    "cispo",
    "clipped_surrogate",
    "count_totals",
    "decoupled_ppo",
    "dft",
    "discopop",
    "dpo",
    "dppo",
    "entropy",
    "exo",
    "f_dpo",
    "full_kl",
    "gmpo",
    "gppo",
    "gspo",
    "gspo_token",
    "hinge",
    "implicit_reward",
    "ipo",
    "jsd",
    "kl",
    "kto",
    "luffy",
    "nca",
    "nll",
    "opmd",
    "orpo",
    "prompt_token_mean",
    "reinforce",
    "robust_dpo",
    "sampled_reverse_kl",
    "sapo",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "simpo",
    "sppo_hard",
    "token_mean",
    "token_sum",
    "topk_kl",
    "topr",
    "trajectory_mean",
    "tv_symmetric",
    "value",
    "vespo",
    "weighted_kl",
]
