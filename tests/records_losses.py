"""How the policy losses beyond PPO's are held to the laws: what matters in each, and what does not bind it and why."""

from typing import Any

import torch

from rlprims.types import VocabShard

SHARED_RATIO = {
    "on policy it is reinforce": "one ratio per response: its tokens share the mean of the advantages, not each its own"
}
DERIVATIVES = ("gradient is the derivative", "second derivative is right", "every second derivative is right")
"""The laws that compare with differences of values, or of gradients, which see through a constant."""
DETACHED_WEIGHT = dict.fromkeys(DERIVATIVES, "the weight is a constant by definition")
SCORE_FUNCTION = {"impossible tokens are finite": "linear in log_probs, which is infinite"}

A_SHARD = VocabShard(0, 10**6, all_reduce=lambda x: 2 * x, all_reduce_max=torch.clone)
"""Of two ranks with the same logits."""


def one_more(x: torch.Tensor) -> torch.Tensor:
    """The all_reduce_rows of a rank beside one that has a token of log-ratio 1 in each sequence."""
    return x + 1


RECORDS: list[dict[str, Any]] = [
    {
        "name": "losses.gspo",
        "call": {},
        "matters": {"clip_low": 0.5, "clip_high": 0.5, "mean": "product", "all_reduce_rows": one_more},
        "exempt": SHARED_RATIO,
    },
    {"name": "losses.gspo", "call": {"clip_low": 0.2, "clip_high": 0.2}, "matters": {}, "exempt": SHARED_RATIO},
    {"name": "losses.gspo", "call": {"mean": "product"}, "matters": {}, "exempt": SHARED_RATIO},
    {
        "name": "losses.gspo_token",
        "call": {},
        "matters": {"clip_low": 0.5, "clip_high": 0.5, "all_reduce_rows": one_more},
        "exempt": dict.fromkeys(DERIVATIVES, "each token answers for the response's ratio by itself"),
    },
    {
        "name": "losses.cispo",
        "call": {},
        "matters": {"w_min": 0.8, "w_max": 1.2},
        "exempt": {**DETACHED_WEIGHT, **SCORE_FUNCTION},
    },
    {"name": "losses.sapo", "call": {}, "matters": {"tau_pos": 0.5, "tau_neg": 2.0}, "exempt": {}},
    {
        "name": "losses.dppo",
        "call": {},
        "matters": {"divergence": "kl", "threshold_low": 0.01, "threshold_high": 0.01, "w_max": 1.01},
        "exempt": {},
    },
    {
        "name": "losses.dppo",
        "call": {"divergence": "kl", "threshold_low": 0.001, "threshold_high": 0.001, "w_max": 1.1},
        "matters": {},
        "exempt": dict.fromkeys(DERIVATIVES, "the bounded weight is a constant"),
    },
    {
        "name": "losses.gmpo",
        "call": {},
        "matters": {"clip_low": 0.1, "clip_high": 0.1, "all_reduce_rows": one_more},
        "exempt": SHARED_RATIO,
    },
    {
        "name": "losses.topr",
        "call": {},
        "matters": {"level": "token", "w_max": 2.0, "all_reduce_rows": one_more},
        "exempt": {**DETACHED_WEIGHT, **SCORE_FUNCTION},
    },
    {
        "name": "losses.topr",
        "call": {"level": "token"},
        "matters": {},
        "exempt": {**DETACHED_WEIGHT, **SCORE_FUNCTION},
    },
    {
        "name": "losses.opmd",
        "call": {},
        "matters": {"tau": 1.0, "level": "token", "all_reduce_rows": one_more},
        "exempt": {"impossible tokens are finite": "grows with the log-ratio, which is infinite"},
    },
    {
        "name": "losses.opmd",
        "call": {"level": "token"},
        "matters": {},
        "exempt": {"impossible tokens are finite": "grows with the log-ratio, which is infinite"},
    },
    {
        "name": "losses.decoupled_ppo",
        "call": {},
        "matters": {"clip_low": 0.1, "clip_high": 0.28, "w_max": 1.01},
        "exempt": {
            "on policy it is reinforce": "the law leaves the behaviour policy apart, and its weight with it",
            "impossible tokens are finite": "impossible under both constants, so that their ratio is of 0 to 0",
        },
    },
    {
        "name": "losses.vespo",
        "call": {},
        "matters": {
            **{"k_pos": 1.0, "lambda_pos": 1.0, "k_neg": 1.0, "lambda_neg": 1.0},
            "all_reduce_rows": one_more,
        },
        "exempt": {**DETACHED_WEIGHT, **SCORE_FUNCTION},
    },
    {
        "name": "losses.gppo",
        "call": {},
        "matters": {"clip_low": 0.1, "clip_high": 0.28, "beta_low": 0.75, "beta_high": 0.5},
        "exempt": dict.fromkeys(DERIVATIVES, "a clipped token is given the gradient that it had on the bound"),
    },
    {
        "name": "losses.aspo",
        "call": {},
        "matters": {"clip_low": 0.5, "clip_high": 1.0, "w_max": 1.1},
        "exempt": DETACHED_WEIGHT,
    },
    {"name": "losses.aspo", "call": {"w_max": 1.5}, "matters": {}, "exempt": DETACHED_WEIGHT},
    {"name": "losses.tv_symmetric", "call": {}, "matters": {"threshold": 0.01}, "exempt": {}},
    {"name": "losses.weighted_kl", "call": {}, "matters": {"value": "k1"}, "exempt": {}},
    {"name": "losses.weighted_kl", "call": {"value": "k1"}, "matters": {}, "exempt": SCORE_FUNCTION},
    {"name": "losses.nll", "call": {}, "matters": {}, "exempt": {}},
    {"name": "losses.dft", "call": {}, "matters": {}, "exempt": DETACHED_WEIGHT},
    {"name": "losses.chord_phi", "call": {}, "matters": {}, "exempt": DETACHED_WEIGHT},
    {
        "name": "losses.luffy",
        "call": {},
        "matters": {"gamma": 0.5, "clip_low": 0.1, "clip_high": 0.28},
        "exempt": {"on policy it is reinforce": "an expert's tokens have no ratio to the policy"},
    },
    {
        "name": "losses.sampled_reverse_kl",
        "call": {},
        "matters": {},
        "exempt": {**dict.fromkeys(DERIVATIVES, "the log-ratio is a constant by definition"), **SCORE_FUNCTION},
    },
    {
        "name": "losses.full_kl",
        "call": {},
        "matters": {"direction": "forward", "temperature": 0.5, "vocab": A_SHARD},
        "exempt": {},
    },
    {"name": "losses.full_kl", "call": {"direction": "forward", "temperature": 0.7}, "matters": {}, "exempt": {}},
    {"name": "losses.jsd", "call": {}, "matters": {"beta": 0.1, "temperature": 0.5, "vocab": A_SHARD}, "exempt": {}},
    {"name": "losses.topk_kl", "call": {}, "matters": {"direction": "reverse"}, "exempt": {}},
    {
        "name": "losses.topk_kl",
        "call": {"direction": "reverse"},
        "matters": {},
        "exempt": {
            "float32 whatever comes in": "the rest is 1 minus a sum; its gradient divides by what rounding leaves of it"
        },
    },
    {"name": "losses.dpo", "call": {}, "matters": {"beta": 0.2, "label_smoothing": 0.1}, "exempt": {}},
    {"name": "losses.implicit_reward", "call": {}, "matters": {"beta": 0.2}, "exempt": {}},
    {"name": "losses.apo_down", "call": {}, "matters": {"beta": 0.2}, "exempt": {}},
    {"name": "losses.apo_zero", "call": {}, "matters": {"beta": 0.2}, "exempt": {}},
    {"name": "losses.bco", "call": {}, "matters": {"beta": 0.2}, "exempt": {}},
    {"name": "losses.bradley_terry", "call": {}, "matters": {"centering": 0.1}, "exempt": {}},
    {"name": "losses.bradley_terry", "call": {"centering": 0.1}, "matters": {}, "exempt": {}},
    {"name": "losses.discopop", "call": {}, "matters": {"beta": 0.2, "tau": 1.0}, "exempt": {}},
    {"name": "losses.exo", "call": {}, "matters": {"beta": 0.2, "label_smoothing": 0.1}, "exempt": {}},
    {
        "name": "losses.f_dpo",
        "call": {"divergence": "alpha"},
        "matters": {"beta": 0.2, "divergence": "js", "alpha": 2.0},
        "exempt": {},
    },
    {"name": "losses.f_dpo", "call": {}, "matters": {}, "exempt": {}},
    {"name": "losses.f_dpo", "call": {"divergence": "js"}, "matters": {}, "exempt": {}},
    {"name": "losses.f_dpo", "call": {"divergence": "reverse_kl"}, "matters": {}, "exempt": {}},
    {"name": "losses.hinge", "call": {}, "matters": {"beta": 0.2}, "exempt": {}},
    {"name": "losses.nca", "call": {}, "matters": {"beta": 0.2}, "exempt": {}},
    {"name": "losses.robust_dpo", "call": {}, "matters": {"beta": 0.2, "label_smoothing": 0.2}, "exempt": {}},
    {"name": "losses.sppo_hard", "call": {}, "matters": {"beta": 0.2}, "exempt": {}},
    {"name": "losses.ipo", "call": {}, "matters": {"tau": 0.2}, "exempt": {}},
    {"name": "losses.simpo", "call": {}, "matters": {"beta": 1.0, "margin": 0.5}, "exempt": {}},
    {"name": "losses.orpo", "call": {}, "matters": {"odds_coef": 1.0}, "exempt": {}},
    {
        "name": "losses.kto",
        "call": {},
        "matters": {"beta": 1.0, "desirable_weight": 2.0, "undesirable_weight": 2.0},
        "exempt": {},
    },
    {"name": "losses.asymre", "call": {}, "matters": {"shift": 0.0}, "exempt": {}},
]
