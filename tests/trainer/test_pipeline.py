"""Batches that are sampled while the ones before them are trained: the same numbers on one process, on two, resumed."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims.data_proto import DataProto
from rlprims.execution import Models, Sampling, UpdateReport
from rlprims.execution.local import LocalExecution
from rlprims.filters import SamplingExhausted
from rlprims.runs.directory import RunDirectory
from rlprims.runs.steps import StepResult, train
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build, resume, start
from tests.trainer.runs import metrics_of

TIS = {"preset": "rloo", "group_size": 2, "corrections": ["rlprims.corrections.tis"]}
WHOLE = "prompts_per_generation=null"  # no surplus, whose groups are older


class Apart(LocalExecution):
    """A sampler with weights of its own. No update may end before the next batch was begun."""

    overlaps = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sampler = LocalExecution(*arguments, **options)
        self.begun = threading.Semaphore(0)

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int) -> DataProto:
        torch.set_num_threads(1)  # it is each thread's own setting
        self.begun.release()
        return self.sampler.generate(prompts, sampling, seed=seed, prompt_width=prompt_width)

    def update(self, batch: DataProto, algorithm: Any) -> UpdateReport:
        assert self.begun.acquire(timeout=30), "nothing is sampled beside this update"
        return super().update(batch, algorithm)

    def sync_weights(self) -> None:
        super().sync_weights()
        self.sampler.sync_weights()
        self.sampler.training.policy.module.load_state_dict(self.training.policy.module.state_dict())


def steps_of(config: Config, console: Console, execution: Callable[..., Models] | None = None) -> list[StepResult]:
    parts = build(config, console)
    steps = list[StepResult]()
    made = parts.execution if execution is None else execution(parts)
    trainer = Trainer(config, made, parts.tokenizer, parts.training.rows)
    train(trainer, [lambda _, step: steps.append(step)])
    return steps


def numbers(steps: list[StepResult]) -> list[dict[str, float]]:
    return [{k: v for k, v in step.metrics.items() if not k.startswith("time/")} for step in steps]


def test_each_batch_but_the_first_is_one_update_old(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    config = load(settings | {"algorithm": TIS, "max_staleness": 1, "steps": 4}, WHOLE)
    steps = steps_of(config, console)
    assert [step.batch["weights_version"].unique().tolist() for step in steps] == [[1], [1], [2], [3]]
    assert [step.metrics["staleness_max"] for step in steps] == [0, 1, 1, 1]
    # The sampler's log-probs are those of then, the old ones those of now: what a correction corrects.
    assert [step.metrics["mismatch_max"] > 1e-3 for step in steps] == [False, True, True, True]
    assert torch.cat([step.batch["sample_id"] for step in steps]).tolist() == list(range(4 * 4 * 2))
    assert steps[-1].metrics["generated_tokens_total"] == sum(step.metrics["generated_tokens"] for step in steps)


def test_a_sampler_apart_gives_the_numbers_of_one_process(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    config = load(settings | {"algorithm": TIS, "max_staleness": 1, "steps": 4}, WHOLE)

    def apart(parts: Any) -> Models:
        return Apart(config.model, config.optimizer, algorithm=config.algorithm, tokenizer=parts.tokenizer,
                     temperature=1.0, updates=4)  # fmt: skip

    assert numbers(steps_of(config, console, apart)) == numbers(steps_of(config, console))


def test_a_run_that_goes_on_from_a_checkpoint_has_its_batch_ahead(
    load: Callable[..., Config],
    settings: dict[str, Any],
    console: Console,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A surplus, dropped groups and greedy baselines all wait in the checkpoint."""
    settings["algorithm"] = {"preset": "remax", "group_size": 3, "corrections": ["rlprims.corrections.tis"],
                             "filter": {"max_generation_batches": 50}}  # fmt: skip
    del settings["data"]["eval"]
    config = load(settings, "max_staleness=1", "steps=4")
    monkeypatch.setattr("rlprims.trainer.session.draw_curves", lambda runs, out: out)  # the slowest part of it
    broken = tmp_path / "broken"
    assert start(config, console) == 0
    shutil.copytree(config.run_dir, broken)
    shutil.rmtree(broken / "checkpoints" / "step_000004")
    run = RunDirectory.open(broken)
    assert resume(run, run.config(Config, []), console) == 0
    assert metrics_of(broken) == metrics_of(config.run_dir)
    for step in (3, 4):
        name = f"step_{step:06d}.jsonl"
        assert (broken / "rollouts" / name).read_text() == (config.run_dir / "rollouts" / name).read_text()


def test_an_error_of_sampling_ahead_ends_the_step_that_it_was_for(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    config = load(settings, "max_staleness=1", "algorithm.filter.max_generation_batches=3", "seed=1")
    parts = build(config, console)
    trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
    too_easy = load(settings, "verifier=tests.trainer.verifiers.always_right")
    take = trainer.collector.take

    def take_the_last_that_teaches() -> Any:
        collected = take()
        trainer.collector.config = too_easy
        return collected

    trainer.collector.take = take_the_last_that_teaches  # type: ignore[method-assign]
    step = trainer.step()
    state, held = trainer.state_dict()
    assert "ahead" not in state
    sampled = [step.batch, *(rows for rows, _ in step.dropped), *held["surplus"]]
    assert state["collector"]["samples"] == sum(len(rows) for rows in sampled), "nothing of the failed one is kept"
    with pytest.raises(SamplingExhausted, match="acc is 1 throughout"):
        trainer.step()
