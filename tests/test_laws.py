"""Every public primitive has a record, and every record keeps the laws. Wrong primitives are caught by name."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import records_advantage
import records_corrections
import records_losses
import records_rewards
import torch

from rlprims import losses
from rlprims.layout import sequence_lengths, sequence_sum, to_tokens
from rlprims.testing import (
    check_advantage,
    check_aggregation,
    check_filter,
    check_logits,
    check_loss,
    check_reward,
    check_selector,
    check_weights,
)

ROOMS = ("advantage", "losses", "corrections", "rewards", "filters", "logprobs", "batching")


@dataclass(frozen=True)
class Record:
    """How one primitive is held to the laws: what to call it with, what must matter, what does not bind it and why."""

    name: str
    check: Callable[..., None]
    call: Mapping[str, Any] = field(default_factory=dict)
    matters: Mapping[str, Any] = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)


STATISTICS_OF_THE_BATCH = {
    "batches may be merged": "mean and variance are those of the whole batch",
    "nan stays in its group": "mean and variance are those of the whole batch",
}
LINEAR_IN_LOG_PROBS = {"impossible tokens are finite": "grows with the log-ratio, which is infinite"}
VALUE_AND_GRADIENT_APART = {"gradient is the derivative": "the gradient is asked to be another estimator's"}


def doubled(x: torch.Tensor) -> torch.Tensor:
    """The all_reduce of two ranks with the same batch."""
    return 2 * x


RECORDS = [
    Record("advantage.discounted_returns", check_advantage, matters={"gamma": 0.9}),
    Record("advantage.discounted_returns", check_advantage, call={"gamma": 0.0}),
    Record("advantage.gae", check_advantage, matters={"gamma": 0.9, "lam": 0.5}),
    Record("advantage.gae", check_advantage, call={"gamma": 0.99, "lam": 0.0}),
    Record("advantage.gae", check_advantage, call={"lam": 1.0}),
    Record(
        "advantage.grpo",
        check_advantage,
        matters={"normalize_std": False, "ddof": 0, "eps": 0.1, "singleton": "raw", "tolerance": 10.0},
    ),
    Record("advantage.grpo", check_advantage, call={"normalize_std": False}),
    Record("advantage.grpo", check_advantage, call={"ddof": 0, "eps": 1e-4}),
    Record("advantage.remax", check_advantage),
    Record("advantage.rloo", check_advantage),
    Record(
        "advantage.whiten",
        check_advantage,
        matters={"ddof": 0, "eps": 0.1, "all_reduce": doubled},
        exempt=STATISTICS_OF_THE_BATCH,
    ),
    Record("losses.clipped_surrogate", check_loss, matters={"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.5}),
    Record("losses.clipped_surrogate", check_loss, call={"dual_clip": 3.0}),
    Record("losses.entropy", check_loss),
    Record("losses.kl", check_loss, matters={"value": "k2", "gradient": "k1"}),
    Record("losses.kl", check_loss, call={"value": "k1"}, exempt=LINEAR_IN_LOG_PROBS),
    Record("losses.kl", check_loss, call={"value": "k2"}, exempt=LINEAR_IN_LOG_PROBS),
    Record("losses.kl", check_loss, call={"value": "abs"}, exempt=LINEAR_IN_LOG_PROBS),
    Record(
        "losses.kl",
        check_loss,
        call={"value": "k3", "gradient": "k2"},
        exempt={**LINEAR_IN_LOG_PROBS, **VALUE_AND_GRADIENT_APART},
    ),
    Record("losses.reinforce", check_loss),
    Record("losses.value", check_loss, matters={"clip": 0.5, "huber_delta": 0.5}),
    Record("losses.value", check_loss, call={"clip": 0.5}),
    Record("losses.value", check_loss, call={"clip": 0.5, "huber_delta": 0.5}),
    Record("losses.prompt_token_mean", check_aggregation),
    Record("losses.seq_mean_token_mean", check_aggregation),
    Record("losses.seq_mean_token_sum", check_aggregation),
    Record("losses.seq_mean_token_sum_norm", check_aggregation, call={"length": 16}, matters={"length": 8}),
    Record("losses.token_mean", check_aggregation),
    Record("losses.token_sum", check_aggregation),
    Record("rewards.at_last_token", check_reward),
    Record("rewards.kl_penalty", check_reward, call={"kl_coef": 0.1}, matters={"kl_coef": 0.2, "estimator": "k3"}),
    Record("rewards.kl_penalty", check_reward, call={"kl_coef": 0.1, "estimator": "k3"}),
    Record(
        "rewards.overlong_penalty",
        check_reward,
        call={"max_length": 5, "buffer_length": 3},
        matters={"max_length": 4, "buffer_length": 2, "penalty_factor": 0.5},
    ),
    Record("rewards.overlong_penalty", check_reward, call={"max_length": 3, "buffer_length": 0}),
    Record(
        "filters.finite",
        check_filter,
        exempt={"equal scores are dropped": "asks whether scores are known, not whether they differ"},
    ),
    Record("filters.nonzero_range", check_filter, matters={"tolerance": 0.9}),
    Record("logprobs.entropy_from_logits", check_logits, matters={"temperature": 0.5}),
    Record("logprobs.entropy_from_logits", check_logits, call={"temperature": 0.7}),
    Record("logprobs.from_logits", check_logits, matters={"temperature": 0.5}),
    Record("logprobs.from_logits", check_logits, call={"temperature": 0.7}),
    Record(
        "logprobs.from_logits",
        check_logits,
        matters={"inplace_backward": True},
        exempt={"hyperparameters matter": "it says where the gradient is written, not what it is"},
    ),
]
RECORDS += [Record(check=check_advantage, **record) for record in records_advantage.RECORDS]
RECORDS += [Record(check=check_loss, **record) for record in records_losses.RECORDS]
RECORDS += [Record(check=check_weights, **record) for record in records_corrections.RECORDS]
RECORDS += [Record(check=check_selector, **record) for record in records_corrections.SELECTORS]
RECORDS += [Record(check=check_reward, **record) for record in records_rewards.SHAPING]
RECORDS += [Record(check=check_filter, **record) for record in records_rewards.FILTERS]

NOT_TENSOR_FUNCTIONS = {
    "advantage.RoleBaseline": "advantage/test_trackers.py",
    "advantage.ValueTracker": "advantage/test_trackers.py",
    "corrections.Weights": "corrections/test_weights.py",
    "corrections.batch_normalized": "corrections/test_batch_normalized.py",
    "logprobs.FusedLoss": "logprobs/test_fused_loss.py",
    "logprobs.LogProbs": "logprobs/test_from_hidden.py",
    "logprobs.from_hidden": "logprobs/test_from_hidden.py",
    "logprobs.from_logits_with_entropy": "logprobs/test_from_logits_with_entropy.py",
    "logprobs.fused_loss": "logprobs/test_fused_loss.py",
    "losses.count_totals": "losses/test_aggregation.py",
    "rewards.verifiers": "rewards/test_verifiers.py",
    "filters.DifficultyPools": "filters/test_difficulty_pools.py",
    "filters.DynamicSampling": "filters/test_dynamic_sampling.py",
    "filters.SamplingExhausted": "filters/test_dynamic_sampling.py",
    "filters.policy_filtration": "filters/test_policy_filtration.py",
    "batching.attention_workload": "batching/test_balance.py",
    "batching.balance": "batching/test_balance.py",
    "batching.micro_batches": "batching/test_micro_batches.py",
    "batching.pack": "batching/test_pack.py",
    "batching.restore_order": "batching/test_restore_order.py",
}
"""Public names that no law of tensors binds, and the tests that do."""


def public_names() -> list[str]:
    return [f"{room}.{name}" for room in ROOMS for name in importlib.import_module(f"rlprims.{room}").__all__]


def function(name: str) -> Callable[..., Any]:
    room, _, attribute = name.partition(".")
    return getattr(importlib.import_module(f"rlprims.{room}"), attribute)


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_a_record(name: str) -> None:
    if name in NOT_TENSOR_FUNCTIONS:
        assert (Path(__file__).parent / NOT_TENSOR_FUNCTIONS[name]).is_file()
        return
    records = [record for record in RECORDS if record.name == name]
    assert records, f"add a Record for {name} to RECORDS, so that it meets the laws"
    told = {parameter for record in records for parameter in record.matters}
    keyword_only = {p.name for p in inspect.signature(function(name)).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert told == keyword_only, f"{name}: `matters` needs another value for exactly {sorted(keyword_only)}"


def test_every_record_is_of_a_public_name() -> None:
    assert {record.name for record in RECORDS} | set(NOT_TENSOR_FUNCTIONS) == set(public_names())


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.name + "".join(f"-{k}={v}" for k, v in r.call.items()))
def test_laws(record: Record) -> None:
    record.check(function(record.name), exempt=record.exempt, alternatives=record.matters, **record.call)


# Deliberately wrong ones: each makes a mistake that a peer has made, and the suite must name the law that it breaks.


def group_mean_over_padding(rewards, group_ids, response_mask, cu_seqlens=None):
    """The group's mean over all positions, padding included."""
    same = (group_ids[:, None] == group_ids[None, :]).to(rewards.dtype)
    s = sequence_sum(rewards, response_mask, cu_seqlens)
    per_row = rewards.sum(-1) if cu_seqlens is None else s
    return to_tokens(s - same @ per_row / same.sum(-1), response_mask, cu_seqlens)


def standard_score(rewards, group_ids, response_mask, cu_seqlens=None):
    """Divides a constant group's rounding residue by its own size."""
    same = (group_ids[:, None] == group_ids[None, :]).to(rewards.dtype)
    s = sequence_sum(rewards, response_mask, cu_seqlens)
    mean = same @ s / same.sum(-1)
    deviation = (same @ (s - mean).square() / same.sum(-1)).sqrt()
    return to_tokens((s - mean) / (deviation + 1e-9), response_mask, cu_seqlens)


def discounted_through_tools(rewards, response_mask, cu_seqlens=None, *, gamma=0.9):
    """Masked tokens discount."""
    weights = gamma ** torch.arange(rewards.shape[-1], dtype=rewards.dtype)
    return torch.where(response_mask, rewards * response_mask * weights, 0.0)


def mask_after_exp(log_probs, old_log_probs, advantages, response_mask, cu_seqlens=None):
    """exp first, mask by multiplication after."""
    return -(log_probs - old_log_probs).exp() * advantages * response_mask


def output_cap(log_probs, ref_log_probs, response_mask, cu_seqlens=None):
    """A cap on the value and none on the input of exp."""
    x = torch.where(response_mask, ref_log_probs - log_probs, 0.0)
    return (x.exp() - 1 - x).clamp(max=10.0)


def old_policy_in_the_graph(log_probs, old_log_probs, advantages, response_mask, cu_seqlens=None):
    """No stop-gradient."""
    x = torch.where(response_mask, log_probs - old_log_probs, 0.0).clamp(-20, 20)
    return -x.exp() * torch.where(response_mask, advantages, 0.0)


def dead_option(log_probs, advantages, response_mask, cu_seqlens=None, *, clip=0.2):
    """An option that is never read."""
    return losses.reinforce(log_probs, advantages, response_mask, cu_seqlens)


def local_token_mean(losses, response_mask, cu_seqlens=None, totals=None):
    """Counts its own tokens although it is told the step's."""
    kept = torch.where(response_mask, losses, 0.0)
    return kept.sum() / response_mask.sum().clamp(min=1)


def mean_of_all_rows(losses, response_mask, cu_seqlens=None, totals=None):
    """A row without tokens counts as a sequence."""
    lengths = sequence_lengths(response_mask, cu_seqlens)
    means = sequence_sum(losses, response_mask, cu_seqlens) / lengths.clamp(min=1)
    return means.sum() / max(len(means), 1)


def detached_zero(losses, response_mask, cu_seqlens=None):
    """Returns early, off the graph, when nothing is valid."""
    if not response_mask.any():
        return torch.zeros(())
    return torch.where(response_mask, losses, 0.0).sum()


def at_last_column(scores, response_mask, cu_seqlens=None):
    """The reward at column −1, on padding."""
    placed = torch.zeros(response_mask.shape, dtype=scores.dtype)
    if cu_seqlens is None:
        placed[:, -1] = scores
    else:
        placed[cu_seqlens[1:] - 1] = scores
    return placed


def penalty_in_place(rewards, response_mask, cu_seqlens=None, *, penalty=0.5):
    """Writes to the caller's rewards."""
    rewards -= penalty
    return rewards * response_mask


def positive_std(scores, group_ids):
    """std > 0 keeps [0.1] * 7."""
    same = group_ids[:, None] == group_ids[None, :]
    keep = [scores[rows].double().std(correction=0) > 0 for rows in same]
    return torch.stack(keep) if keep else torch.zeros(0, dtype=torch.bool)


def quantile_over_padding(entropies, response_mask, cu_seqlens=None):
    """The quantile of all positions, padding included."""
    return response_mask & (entropies >= entropies.flatten().quantile(0.8))


def best_rows(scores, group_ids):
    """Keeps rows, not groups."""
    return scores.float() > 0


def bf16_entropy(logits, *, temperature=1.0):
    """Reduced in the dtype of the logits, and 0 · log 0 is NaN."""
    p = (logits / temperature).softmax(-1)
    return -(p * p.log()).sum(-1)


WRONG = [
    (check_advantage, group_mean_over_padding, ["padding changes nothing", "packed equals padded", "masked is absent"]),
    (check_advantage, standard_score, ["equal rewards give zero"]),
    (check_advantage, discounted_through_tools, ["packed equals padded", "padding changes nothing"]),
    (check_loss, mask_after_exp, ["masked is absent", "far log ratios are finite"]),
    (check_loss, output_cap, ["far log ratios are finite"]),
    (check_loss, old_policy_in_the_graph, ["constants get no gradient"]),
    (check_aggregation, local_token_mean, ["parts sum to the whole"]),
    (check_aggregation, mean_of_all_rows, ["parts sum to the whole", "rows without tokens do not count"]),
    (
        check_aggregation,
        detached_zero,
        ["nothing valid gives zero", "no value is read by the host", "traces without a break"],
    ),
    (check_reward, at_last_column, ["zero outside the mask", "padding changes nothing", "empty batches are legal"]),
    (check_reward, penalty_in_place, ["inputs are untouched"]),
    (check_selector, quantile_over_padding, ["padding changes nothing", "packed equals padded", "masked is absent"]),
    (check_filter, positive_std, ["equal scores are dropped"]),
    (check_filter, best_rows, ["groups are kept whole"]),
    (check_logits, bf16_entropy, ["banned tokens are legal", "float32 whatever comes in"]),
]


@pytest.mark.parametrize(("check", "fn", "laws"), WRONG, ids=[fn.__name__ for _, fn, _ in WRONG])
def test_a_wrong_primitive_is_caught(check: Callable[..., None], fn: Callable[..., Any], laws: list[str]) -> None:
    with pytest.raises(AssertionError) as caught:
        check(fn)
    report = str(caught.value)
    assert report.startswith(f"{fn.__name__} breaks ")
    for law in laws:
        assert f"\n  {law}: " in report


def test_an_option_without_effect_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"hyperparameters matter: clip=0\.1 changes nothing"):
        check_loss(dead_option, alternatives={"clip": 0.1})


def test_the_report_says_law_argument_and_difference() -> None:
    with pytest.raises(AssertionError) as caught:
        check_advantage(group_mean_over_padding)
    assert "masked is absent: the value with nan outside the mask of rewards (padded) differs by up to inf at [" in str(
        caught.value
    )


def test_a_name_outside_the_vocabulary_is_refused() -> None:
    def loss(logp, response_mask, cu_seqlens=None):
        return logp

    with pytest.raises(ValueError, match="'logp' before \\* is not in the vocabulary"):
        check_loss(loss)


def test_an_exemption_must_be_of_a_law_that_binds_and_breaks() -> None:
    with pytest.raises(ValueError, match="no such law"):
        check_loss(losses.reinforce, exempt={"no such law": "reason"})
    with pytest.raises(AssertionError, match="masked is absent: holds after all, so it needs no exemption"):
        check_loss(losses.reinforce, exempt={"masked is absent": "reason"})
