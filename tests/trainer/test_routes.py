"""Runs of a mixture of experts with ``model.replay_routes``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from rlprims.runs.steps import train
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build
from tests import tiny
from tests.trainer.runs import metrics_of, rlprims


@pytest.fixture
def mixture(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    path = tiny.save_mixture(tmp_path / "mixture", norm_topk_prob=True)
    return {**settings, "model": {**settings["model"], "path": str(path), "replay_routes": True}}


@pytest.mark.slow
def test_a_run_with_the_command_and_its_resume(
    mixture: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    """Groups that wait in the checkpoint keep their experts: a resumed run has the metrics of a whole one."""
    runs = tmp_path / "whole", tmp_path / "resumed"
    for run, steps in zip(runs, (6, 4), strict=True):
        rlprims("train", write_config({**mixture, "run_dir": str(run)}), f"steps={steps}", "evaluation.every=2")
    rlprims("resume", runs[1], "steps=6")
    whole, resumed = map(metrics_of, runs)
    assert whole == resumed
    assert len(whole) >= 6
    assert all("routed_experts" not in file.read_text() for file in (runs[0] / "rollouts").iterdir())
    with pytest.raises(ValidationError, match=r"a recording has no experts; set model\.replay_routes: false"):
        Config(**{**mixture, "replay": runs[0]})
    replayed = {**mixture, "replay": str(runs[0]), "run_dir": str(tmp_path / "replayed")}
    rlprims("train", write_config(replayed), "model.replay_routes=false", "steps=2")


@pytest.mark.parametrize("algorithm", ["reinforce", "grpo", "ppo"])
def test_sampler_and_trainer_are_one_policy(
    load: Callable[..., Config], mixture: dict[str, Any], console: Console, algorithm: str
) -> None:
    """In every step, after updates too, with a reference and with a critic."""
    mixture |= {"algorithm": {"preset": algorithm, "group_size": 2}, "prompts_per_generation": None}
    corrected = "algorithm.corrections=[rlprims.corrections.tis]"
    parts = build(config := load(mixture, corrected, "steps=3"), console)
    done = list[Any]()
    train(Trainer(config, parts.execution, parts.tokenizer, parts.training.rows), [lambda _, step: done.append(step)])
    assert len(done) == 3
    for step in done:
        assert bool((step.batch["routed_experts"] >= 0).any())
        assert step.metrics["mismatch_max"] < 1e-5
        assert step.metrics["mismatch_ess"] == pytest.approx(1, abs=1e-6)


def test_episodes_are_refused(mixture: dict[str, Any]) -> None:
    mixture["data"] |= {"environment": "tests.trainer.environments.Digits"}
    with pytest.raises(ValidationError, match=r"model\.replay_routes is for single responses"):
        Config(**mixture)
