"""Losses per token, to be minimized, and the aggregations that reduce them to a scalar.

A loss, its aggregation and its diagnostics are three functions. Losses return one number per token, 0 outside the mask:
``loss = losses.token_mean(losses.clipped_surrogate(...), response_mask)``. Only ``log_probs``, ``logits``,
``topk_log_probs``, ``router_logits``, ``new_values`` and ``entropies`` get gradients; all other inputs are treated as
constants. A loss with the attribute ``token_wise`` computes the loss of a token from that token's inputs only.

An aggregation divides by ``totals``, the counts of the whole optimizer step (:func:`count_totals`), so that the results
of its micro-batches and ranks add up to the result of the step. Without ``totals`` it counts the given batch: the
result is the mean of that batch, and the results of several batches do not add up to the mean of all.

>>> import torch
>>> x = torch.tensor([[10.0, 0.0, 0.0], [2.0, 2.0, 2.0]])
>>> mask = torch.tensor([[True, False, False], [True, True, True]])
>>> step_totals = count_totals(mask)
>>> [float(token_mean(x[[i]], mask[[i]], totals=step_totals)) for i in (0, 1)]  # the sum is token_mean(x, mask), 4
[2.5, 1.5]
>>> [float(token_mean(x[[i]], mask[[i]])) for i in (0, 1)]  # means of each row: neither their sum nor their mean is 4
[10.0, 2.0]

A policy loss with ``old_log_probs`` uses the ratio to the policy at the start of the step. A policy loss with
``rollout_log_probs`` uses the ratio to the policy that sampled, as its paper does; it needs no
:func:`rlprims.corrections.importance_weights`.

Preference losses (:func:`dpo`, :func:`kto`, :func:`implicit_reward`, ...) take one log-prob for each response,
:func:`bradley_terry` one score. They return one number for each pair or response; the loss is its mean.
"""

from rlprims._near import suggest_attributes
from rlprims.losses._aggregation import (
    count_totals, prompt_token_mean, seq_mean_token_mean, seq_mean_token_sum, seq_mean_token_sum_norm, token_mean,
    token_sum, trajectory_mean,
)  # fmt: skip
from rlprims.losses._clipped import aspo, clipped_surrogate, decoupled_ppo, dppo, gppo, sapo, tv_symmetric
from rlprims.losses._distillation import full_kl, jsd, topk_jsd, topk_kl
from rlprims.losses._group import flowrl, gvpo, online_dpo, rewards_as_labels, tail_weighted_sums
from rlprims.losses._kl import kl, sampled_reverse_kl, sdar, weighted_kl
from rlprims.losses._preference import dpo, implicit_reward, ipo, kto, orpo, simpo
from rlprims.losses._preference_pairs import (
    apo_down, apo_zero, bco, bradley_terry, discopop, exo, f_dpo, hinge, nca, robust_dpo, sppo_hard,
)  # fmt: skip
from rlprims.losses._router import load_balance
from rlprims.losses._sequence import gmpo, gspo, gspo_token, opmd
from rlprims.losses._value import value_loss
from rlprims.losses._weighted import asymre, chord_phi, cispo, dft, luffy, negative_entropy, nll, reinforce, topr, vespo

__all__ = [
    "apo_down", "apo_zero", "aspo", "asymre", "bco", "bradley_terry", "chord_phi", "cispo", "clipped_surrogate",
    "count_totals", "decoupled_ppo", "dft", "discopop", "dpo", "dppo", "exo", "f_dpo", "flowrl", "full_kl", "gmpo",
    "gppo", "gspo", "gspo_token", "gvpo", "hinge", "implicit_reward", "ipo", "jsd", "kl", "kto", "load_balance",
    "luffy", "nca", "negative_entropy", "nll", "online_dpo", "opmd", "orpo", "prompt_token_mean", "reinforce",
    "rewards_as_labels", "robust_dpo", "sampled_reverse_kl", "sapo", "sdar", "seq_mean_token_mean",
    "seq_mean_token_sum", "seq_mean_token_sum_norm", "simpo", "sppo_hard", "tail_weighted_sums", "token_mean",
    "token_sum", "topk_jsd", "topk_kl", "topr", "trajectory_mean", "tv_symmetric", "value_loss", "vespo",
    "weighted_kl",
]  # fmt: skip

suggest_attributes(__name__, __all__)
