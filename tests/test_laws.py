"""Every public primitive has a record, and every record keeps the laws.

The compiler, which takes seconds, is in test_laws_slow; that wrong primitives are caught by name is in test_laws_catch.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import records_advantage
import records_corrections
import records_losses
import records_rewards
import records_transforms
import torch

from rlprims import diagnostics
from rlprims.testing import (
    check_advantage,
    check_aggregation,
    check_filter,
    check_logits,
    check_loss,
    check_reward,
    check_selector,
    check_transforms,
    check_weights,
)
from rlprims.testing._bindings import Effort
from rlprims.testing._laws_loss import tokens_are_independent
from rlprims.testing._primitive import DIFFERENTIABLE, Primitive
from rlprims.types import VocabShard

PACKAGES = ("advantage", "losses", "corrections", "rewards", "filters", "logprobs", "batching")


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


A_SHARD = VocabShard(0, 10**6, all_reduce=doubled, all_reduce_max=torch.clone)
"""Of two ranks with the same logits."""

RECORDS = [
    Record(
        "advantage.discounted_returns",
        check_advantage,
        matters={"gamma": 0.9, "shard": records_advantage.FIRST_OF_TWO},
    ),
    Record("advantage.discounted_returns", check_advantage, call={"gamma": 0.0}),
    Record(
        "advantage.gae",
        check_advantage,
        matters={"gamma": 0.9, "lam": 0.5, "shard": records_advantage.FIRST_OF_TWO},
    ),
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
    Record("losses.trajectory_mean", check_aggregation),
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
    Record("corrections.replace_nonfinite", check_reward),
    Record(
        "filters.finite",
        check_filter,
        exempt={"equal scores are dropped": "asks whether scores are known, not whether they differ"},
    ),
    Record("filters.nonzero_range", check_filter, matters={"tolerance": 0.9}),
    Record("logprobs.entropy_from_logits", check_logits, matters={"temperature": 0.5, "vocab": A_SHARD}),
    Record("logprobs.entropy_from_logits", check_logits, call={"temperature": 0.7}),
    Record("logprobs.from_logits", check_logits, matters={"temperature": 0.5, "vocab": A_SHARD}),
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
RECORDS = [replace(r, exempt={**r.exempt, **records_transforms.exemptions(r.name)}) for r in RECORDS]

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
    return [
        f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(f"rlprims.{package}").__all__
    ]


def function(name: str) -> Callable[..., Any]:
    package, _, attribute = name.partition(".")
    return getattr(importlib.import_module(f"rlprims.{package}"), attribute)


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


def test_transforms_bind_every_public_name_or_a_reason_is_told() -> None:
    metrics = [f"diagnostics.{name}" for name in diagnostics.__all__]
    apart = {record["name"] for record in records_transforms.RECORDS}
    assert apart | set(records_transforms.NONE_POSSIBLE) == {*NOT_TENSOR_FUNCTIONS, *metrics}
    assert not apart & set(records_transforms.NONE_POSSIBLE)


def label(record: Record) -> str:
    return record.name + "".join(f"-{k}={v}" for k, v in record.call.items())


FIRST_RECORDS = {record.name: record for record in reversed(RECORDS)}
"""The first record of each primitive, by its name."""


@pytest.mark.parametrize("record", list(FIRST_RECORDS.values())[::-1], ids=label)
def test_laws(record: Record) -> None:
    hold(record)


@pytest.mark.slow
@pytest.mark.parametrize(
    "record", [record for record in RECORDS if record is not FIRST_RECORDS[record.name]], ids=label
)
def test_laws_with_other_options(record: Record) -> None:
    hold(record)


def hold(record: Record, effort: Effort = "quick") -> None:
    fn = function(record.name)
    record.check(fn, exempt=record.exempt, alternatives=record.matters, effort=effort, **record.call)


@pytest.mark.parametrize("record", records_transforms.RECORDS, ids=lambda record: record["name"])
def test_transforms(record: dict[str, Any]) -> None:
    check_transforms(record["fn"], exempt=record["exempt"], effort="quick", inputs=record["inputs"])


TOKEN_WISE_BY_CHANCE: dict[str, str] = {}
"""Losses that keep the law and do not declare it, and why."""


@pytest.mark.parametrize("name", sorted({r.name for r in RECORDS if r.check is check_loss}))
def test_a_loss_of_single_tokens_declares_it(name: str) -> None:
    records = [record for record in RECORDS if record.name == name]
    if all(is_token_wise(record) for record in records):
        declared = getattr(function(name), "token_wise", False)
        assert declared != (name in TOKEN_WISE_BY_CHANCE), f"decorate {name} with @token_wise, or list it with a reason"
    else:
        assert name not in TOKEN_WISE_BY_CHANCE


def is_token_wise(record: Record) -> bool:
    try:
        tokens_are_independent(Primitive(function(record.name), record.call, {}, DIFFERENTIABLE))
    except AssertionError:
        return False
    return True
