"""Runs that sample with top-k, top-p or min-p: the trainer scores the policy that was sampled from."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims.data_proto import DataProto
from rlprims.execution import kept_of
from rlprims.execution.local import LocalExecution
from rlprims.reports.rollouts import read_rollouts
from rlprims.runs.directory import RunDirectory
from rlprims.runs.steps import train
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.scoring.groups import join_groups
from rlprims.trainer.session import build, resume, start
from tests.trainer.runs import metrics_of

TRUNCATED = {
    "top_k": ("sampling.top_k=6",),
    "top_p": ("sampling.top_p=0.8",),
    "min_p": ("sampling.min_p=0.1",),
    "all three": ("sampling.top_k=20", "sampling.top_p=0.9", "sampling.min_p=0.02", "sampling.temperature=0.8"),
}
FRESH = ("algorithm.filter=null", "prompts_per_generation=null")  # no surplus, whose groups are older
CORRECTED = "algorithm.corrections=[rlprims.corrections.tis]"


@pytest.fixture
def steps(load: Callable[..., Config], settings: dict[str, Any], console: Console) -> Callable[..., list[Any]]:
    def run(*overrides: str) -> list[Any]:
        parts = build(config := load(settings, *overrides), console)
        trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
        done = list[Any]()
        train(trainer, [lambda _, step: done.append(step)])
        return done

    return run


@pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused head"])
@pytest.mark.parametrize("name", TRUNCATED)
def test_sampler_and_trainer_are_one_policy(steps: Callable[..., list[Any]], name: str, fused: bool) -> None:
    """In every step, after updates too: the weights of tis are 1, and the old log-probs are the sampler's."""
    for step in steps(*TRUNCATED[name], *FRESH, CORRECTED, "steps=3", f"model.fused_head={str(fused).lower()}"):
        batch = step.batch
        assert bool((batch["kept_counts"][batch["response_mask"]] > 0).any())
        assert step.metrics["mismatch_max"] < 1e-5
        assert step.metrics["mismatch_ess"] == pytest.approx(1, abs=1e-6)
        torch.testing.assert_close(batch["old_log_probs"], batch["rollout_log_probs"], rtol=1e-5, atol=1e-5)
        if not fused:
            assert 0.4 < step.metrics["support_mass"] < 0.97
            assert step.metrics["outside_support"] == 0


def test_without_truncation_nothing_is_recorded(steps: Callable[..., list[Any]]) -> None:
    (step,) = steps("steps=1")
    assert "kept_ids" not in step.batch
    assert "support_mass" not in step.metrics


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "grpo", "group_size": 3},
        {"preset": "remax", "group_size": 3},
        {"preset": "ppo", "group_size": 2, "mini_batches": 2, "epochs": 2, "kl_in_reward": {"estimator": "k1"}},
    ],
    ids=["grpo", "remax", "ppo"],
)
def test_with_a_reference_a_baseline_or_a_critic(
    settings: dict[str, Any], steps: Callable[..., list[Any]], algorithm: dict[str, Any]
) -> None:
    """Greedy responses have no sets. Mini-batches have those of their rows; the reference begins as the policy."""
    settings |= {"algorithm": algorithm, "prompts_per_generation": None}
    first, second = steps("sampling.top_p=0.8", "steps=2", "evaluation.every=1")
    assert "kept_ids" in second.batch
    if "ref_log_probs" in first.batch:
        torch.testing.assert_close(first.batch["ref_log_probs"], first.batch["rollout_log_probs"], rtol=1e-5, atol=1e-5)
    if "mismatch_max" in second.metrics:
        assert second.metrics["mismatch_max"] < 1e-5


def test_the_samplers_log_probs_serve_as_the_trainers(
    steps: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """recompute_log_probs_every above 1: a step that computes them finds no gap, though the sampler truncates."""
    computed, log_probs = list[int](), LocalExecution.log_probs

    def counted(execution: LocalExecution, batch: Any, **how: Any) -> Any:
        computed.append(int(batch["weights_version"].max()))
        return log_probs(execution, batch, **how)

    monkeypatch.setattr(LocalExecution, "log_probs", counted)
    done = steps("sampling.top_p=0.8", *FRESH, "recompute_log_probs_every=2", "steps=3")
    assert torch.equal(done[1].batch["old_log_probs"], done[1].batch["rollout_log_probs"])
    assert {*computed} == {1, 3}, "the bits may be equal, so calls are counted"
    torch.testing.assert_close(done[2].batch["old_log_probs"], done[2].batch["rollout_log_probs"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_same_metrics(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, tmp_path: Path, staleness: int
) -> None:
    """The groups that wait in a checkpoint, and the batch ahead, have their sets."""
    options = ("sampling.top_p=0.8", "sampling.top_k=20", CORRECTED, f"max_staleness={staleness}", "steps=4")
    config, broken = load(settings, *options, "evaluation.every=4"), tmp_path / "broken"
    assert start(config, console) == 0
    shutil.copytree(config.run_dir, broken)
    shutil.rmtree(broken / "checkpoints" / "step_000004")
    waiting = [DataProto.load(found.parent / "0") for found in broken.rglob("groups.json")]
    assert len(waiting) > staleness
    for groups in waiting:
        assert groups["kept_ids"].values().numel() == int(groups["kept_counts"].sum()) > 0
    run = RunDirectory.open(broken)
    assert resume(run, run.config(Config, []), console) == 0
    assert metrics_of(broken) == metrics_of(config.run_dir)
    line = (broken / "rollouts" / "step_000004.jsonl").read_text().splitlines()[0]
    assert all(
        token in ids for token, ids in zip(*(json.loads(line)[n] for n in ("response_ids", "kept")), strict=True)
    )
    assert "kept" not in read_rollouts(broken)[0].columns  # what the pages and tables show beside the texts
    assert all("support_mass" in line for line in metrics_of(broken) if line["kind"] == "train")


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1], ids=["turned on", "turned off"])
def test_truncation_may_change_in_mid_run(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, order: int
) -> None:
    """Groups that wait were drawn by the settings of their time: their sets say so, beside those of other groups."""
    first, second = ("sampling.top_p=1.0", "sampling.top_p=0.8")[::order]
    assert start(load(settings, first, "steps=2"), console) == 0
    run = RunDirectory.open(Path(settings["run_dir"]))
    assert resume(run, run.config(Config, [second, "steps=4"]), console) == 0
    assert all(line["outside_support"] == 0 for line in metrics_of(run.path) if "outside_support" in line)
    assert any("support_mass" in line for line in metrics_of(run.path))


def test_a_group_without_sets_joins_those_with(steps: Callable[..., list[Any]]) -> None:
    (step,) = steps("sampling.top_p=0.8", *FRESH, "steps=1")
    first, second = step.batch[:3], step.batch[3:6]
    plain = second.select(batch_keys=[name for name in dict(second.batch.items()) if not name.startswith("kept")])
    both = join_groups([plain, first])
    assert not both[:3]["kept_counts"].any()
    assert torch.equal(both[3:]["kept_ids"].values(), first["kept_ids"].values())
    kept = kept_of(both)
    assert kept is not None
    assert kept.allowed(32)[: plain["responses"].numel()].all()
    assert torch.equal(kept.allowed(32)[plain["responses"].numel() :], kept_of(first).allowed(32))  # type: ignore[union-attr]
    assert "kept_ids" not in join_groups([plain])
