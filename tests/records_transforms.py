"""Functions whose arguments or results are not one tensor each, as functions of tensors, for the laws of transforms."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlprims import diagnostics
from rlprims.corrections import Weights, batch_normalized
from rlprims.logprobs import from_hidden, from_logits_with_entropy, fused_full_kl, fused_loss
from rlprims.losses import count_totals, reinforce
from rlprims.types import Metric, Metrics


def values(metrics: Metric | Metrics) -> Tensor:
    """Every metric's number, one beside the other."""
    found = metrics.values() if isinstance(metrics, Mapping) else [metrics]
    return torch.stack([metric.value().double() for metric in found])


def head_of(logits: Tensor) -> Tensor:
    """Some rows of the batch as the weight of an LM head: float (V, H)."""
    return logits.flatten(0, -2)[: logits.shape[-1]]


def normalized_weights(importance_weights, response_mask, cu_seqlens=None):
    return batch_normalized(Weights(importance_weights), response_mask, cu_seqlens).values


def log_probs_and_entropies(logits, responses):
    return torch.stack(from_logits_with_entropy(logits, responses))


def log_probs_of_hidden(logits, teacher_logits, responses):
    return torch.stack(from_hidden(logits, head_of(teacher_logits), responses))


def fused_reinforce(logits, teacher_logits, responses, importance_weights, response_mask, advantages):
    data = {"advantages": advantages}
    head = head_of(teacher_logits)
    return fused_loss(logits, head, responses, importance_weights, response_mask, reinforce, data).loss


def fused_divergence(logits, teacher_logits, response_mask, cu_seqlens=None):
    head = head_of(teacher_logits)
    return fused_full_kl(logits, head, teacher_logits, head.flip(0), response_mask, cu_seqlens, divergence="jsd")


def totals(response_mask, group_ids, trajectory_ids, cu_seqlens=None):
    return torch.stack(count_totals(response_mask, cu_seqlens, group_ids, trajectory_ids))


def best_at_2(scores, group_ids):
    return values(diagnostics.best_at_k(scores, group_ids, k=2))


def dead_groups(scores, group_ids):
    return values(diagnostics.dead_groups(scores, group_ids))


def divergences(log_probs, ref_log_probs, response_mask):
    return values(diagnostics.divergences(log_probs, ref_log_probs, response_mask))


def explained_variance(new_values, returns, response_mask):
    return values(diagnostics.explained_variance(new_values, returns, response_mask))


def support_mass(log_probs, whole_log_probs, response_mask):
    return values(diagnostics.support_mass(log_probs, whole_log_probs, response_mask))


def length_correlation(scores, response_mask, cu_seqlens=None):
    return values(diagnostics.length_correlation(scores, response_mask, cu_seqlens))


def log_perplexity(log_probs, response_mask, cu_seqlens=None):
    return values(diagnostics.log_perplexity(log_probs, response_mask, cu_seqlens))


def nonfinite(rewards, response_mask):
    return values(diagnostics.nonfinite(rewards, response_mask))


def pass_at_2(scores, group_ids):
    return values(diagnostics.pass_at_k(scores > 0, group_ids, k=2))


def ratio_stats(log_probs, old_log_probs, advantages, response_mask):
    return values(
        diagnostics.ratio_stats(log_probs, old_log_probs, advantages, response_mask, clip_low=0.2, clip_high=0.3)
    )


def rejections(rewards, advantages, response_mask, cu_seqlens=None):
    return values(diagnostics.rejections({"low": rewards > -0.5, "high": advantages < 1}, response_mask, cu_seqlens))


def responses(scores, response_mask, cu_seqlens=None):
    return values(diagnostics.response_stats(scores, response_mask, cu_seqlens))


def sampler_mismatch(old_log_probs, rollout_log_probs, response_mask, cu_seqlens=None):
    return values(diagnostics.sampler_mismatch(old_log_probs, rollout_log_probs, response_mask, cu_seqlens))


def share(valid_rows):
    return values(diagnostics.fraction(valid_rows))


def staleness(turn_ids, response_mask):
    return values(diagnostics.staleness(turn_ids, 1000, response_mask))  # turn ids stand for versions


def token_max(rewards, response_mask):
    return values(diagnostics.token_max(rewards, response_mask))


def token_mean(rewards, response_mask):
    return values(diagnostics.mean_over_tokens(rewards, response_mask))


def weights(importance_weights, response_mask):
    return values(diagnostics.weight_stats(importance_weights, response_mask))


WITHOUT_A_RULE = {
    "aten.scatter_reduce.two": (
        *("advantage.beta_normalized", "advantage.gdpo", "advantage.gigpo", "advantage.gpg", "advantage.grpo"),
        *("advantage.optimal_value", "advantage.pass_at_k_training", "advantage.pkpo", "advantage.quantile_baseline"),
        *("advantage.reinforce_pp_baseline", "advantage.tree_grpo", "advantage.turn_grpo"),
        *("filters.varied_scores", "filters.solve_rate", "filters.varied_components"),
        *(
            "rewards.cost_per_token",
            "rewards.relative_length",
            "diagnostics.dead_groups",
            "losses.online_dpo",
            "losses.rewards_as_labels",
            "losses.tail_weighted_sums",
        ),
    ),
}
"""Operations for which torch 2.13 has no rule of DTensor, and what calls them."""

OF_DTENSORS = ("replicated tensors work", "row sharded tensors work")


def without_a_rule(operation: str) -> dict[str, str]:
    return dict.fromkeys(OF_DTENSORS, f"torch has no rule of DTensor for {operation}")


def exemptions(name: str) -> dict[str, str]:
    """Under every call of a function."""
    exempt: dict[str, str] = {}
    for operation, names in WITHOUT_A_RULE.items():
        if name in names:
            exempt |= without_a_rule(operation)
    return exempt


def record(
    name: str, fn: Callable[..., Tensor], inputs: tuple[str, ...] = (), exempt: dict[str, str] | None = None
) -> dict[str, Any]:
    return {"name": name, "fn": fn, "inputs": inputs, "exempt": {**(exempt or {}), **exemptions(name)}}


RECORDS: list[dict[str, Any]] = [
    record("corrections.batch_normalized", normalized_weights),
    record("logprobs.from_hidden", log_probs_of_hidden, ("logits", "teacher_logits")),
    record("logprobs.from_logits_with_entropy", log_probs_and_entropies, ("logits",)),
    record("logprobs.fused_full_kl", fused_divergence, ("logits",)),
    record(
        "logprobs.fused_loss",
        fused_reinforce,
        ("logits", "teacher_logits"),
        {"row sharded tensors work": "it flattens the rows, and packed tokens may not be sharded: use to_local()"},
    ),
    record("losses.count_totals", totals),
    record("diagnostics.best_at_k", best_at_2),
    record("diagnostics.dead_groups", dead_groups),
    record("diagnostics.divergences", divergences),
    record("diagnostics.explained_variance", explained_variance),
    record("diagnostics.support_mass", support_mass),
    record("diagnostics.length_correlation", length_correlation),
    record("diagnostics.log_perplexity", log_perplexity),
    record("diagnostics.nonfinite", nonfinite),
    record("diagnostics.pass_at_k", pass_at_2),
    record("diagnostics.ratio_stats", ratio_stats),
    record("diagnostics.rejections", rejections),
    record("diagnostics.response_stats", responses),
    record("diagnostics.sampler_mismatch", sampler_mismatch),
    record("diagnostics.fraction", share),
    record("diagnostics.staleness", staleness),
    record("diagnostics.token_max", token_max),
    record("diagnostics.mean_over_tokens", token_mean),
    record("diagnostics.weight_stats", weights),
]
"""For ``check_transforms``: the function, what it is differentiated by, and which laws do not bind it and why."""

NONE_POSSIBLE = {
    "advantage.RoleBaseline": "a trainer's stateful tracker: it reads numbers to the host and keeps them by name",
    "advantage.ValueTracker": "a trainer's stateful tracker: it reads numbers to the host and keeps them by name",
    "batching.attention_workload": "a function of lengths on the host",
    "batching.balance": "a function of lengths on the host",
    "batching.micro_batches": "a function of lengths on the host",
    "batching.pack": "a function of lengths on the host",
    "batching.PrefixTree": "a class: what prefix_tree returns",
    "batching.prefix_tree": "the number of distinct tokens is the size of its result",
    "batching.restore_order": "a function of row numbers on the host",
    "corrections.Weights": "a type",
    "diagnostics.majority_at_k": "counts choices on the host, in integers of any size",
    "filters.DifficultyPools": "a trainer's stateful tracker of prompts, by name",
    "filters.DynamicSampling": "a trainer's stateful buffer of groups, by name",
    "filters.SamplingExhausted": "an exception",
    "filters.policy_filtration": "draws rows by a torch.Generator, whose state no transform carries",
    "logprobs.FusedLoss": "a type",
    "logprobs.LogProbs": "a type",
    "rewards.verifiers": "functions of text",
}
"""Public names to which no transform of tensors applies, and why."""
