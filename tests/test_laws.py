"""Every public primitive has a record, and every record keeps the laws.

The first call of each has the quick laws here; all calls have all laws in test_laws_slow. That wrong primitives are
caught by name is in test_laws_catch.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlprims import diagnostics
from rlprims.testing import (
    check_loss,
    check_transforms,
)
from rlprims.testing._bindings import Effort
from rlprims.testing._laws_kinds import tokens_are_independent
from rlprims.testing._primitive import DIFFERENTIABLE, Primitive
from tests import records_transforms
from tests.records import Record, written_beside_the_tests_of

PACKAGES = ("advantage", "losses", "corrections", "rewards", "filters", "logprobs", "batching")


RECORDS = [
    replace(record, exempt={**record.exempt, **records_transforms.exemptions(record.name)})
    for package in PACKAGES
    for record in written_beside_the_tests_of(package)
]

NOT_TENSOR_FUNCTIONS = {
    "advantage.RoleBaseline": "advantage/test_trackers.py",
    "advantage.ValueTracker": "advantage/test_trackers.py",
    "corrections.Weights": "corrections/test_weights.py",
    "corrections.batch_normalized": "corrections/test_batch_normalized.py",
    "logprobs.FusedLoss": "logprobs/test_fused_loss.py",
    "logprobs.LogProbs": "logprobs/test_from_hidden.py",
    "logprobs.from_hidden": "logprobs/test_from_hidden.py",
    "logprobs.from_logits_with_entropy": "logprobs/test_from_logits_with_entropy.py",
    "logprobs.fused_full_kl": "logprobs/test_fused_full_kl.py",
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
    "batching.PrefixTree": "batching/test_prefix_tree.py",
    "batching.prefix_tree": "batching/test_prefix_tree.py",
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
    assert records, f"add a Record for {name} to the RECORDS of its unit test, so that it meets the laws"
    told = {parameter for record in records for parameter in record.matters}
    keyword_only = {p.name for p in inspect.signature(function(name)).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert told == keyword_only, f"{name}: `matters` needs another value for exactly {sorted(keyword_only)}"


def test_every_record_is_of_a_public_name() -> None:
    assert {record.name for record in RECORDS} | set(NOT_TENSOR_FUNCTIONS) == set(public_names())


def test_every_public_name_has_its_transforms_or_a_reason() -> None:
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


def hold(record: Record, effort: Effort = "quick") -> None:
    fn = function(record.name)
    record.check(fn, exempt=record.exempt, alternatives=record.matters, effort=effort, **record.call)


@pytest.mark.parametrize("record", records_transforms.RECORDS, ids=lambda record: record["name"])
def test_transforms(record: dict[str, Any]) -> None:
    check_transforms(record["fn"], exempt=record["exempt"], effort="quick", inputs=record["inputs"])


TOKEN_WISE_BY_CHANCE: dict[str, str] = {"losses.load_balance": "without expert_counts it counts the given batch"}
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
