"""A run on Ray from the command line: as the local one, and whole again after a rank was killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.processes import tree
from tests.trainer.runs import metrics_of

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
CLUSTER = {"training_workers": 2, "rollout_workers": 1, "engine": "hf", "call_timeout": 120.0}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "rlprims", *map(str, arguments)]


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"execution": "ray", "ray": CLUSTER, "optimizer": {"lr": 1e-4, "eps": 1e-4}}


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_metrics_are_those_of_one_process(
    settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], tmp_path: Path, staleness: int
) -> None:
    config = write_config(settings | {"staleness": staleness})
    for name in ("ray", "local"):
        subprocess.run(
            command("train", config, f"run_dir={tmp_path / name}", f"execution={name}"), cwd=ROOT, check=True
        )
    pairs = zip(metrics_of(tmp_path / "ray"), metrics_of(tmp_path / "local"), strict=True)
    for ours, theirs in pairs:
        assert ours.pop("kind") == theirs.pop("kind")
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True)


def test_a_killed_rank_ends_the_run_and_a_resume_repeats_the_rest(
    settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    settings |= {"steps": 12, "checkpoint": {"every": 3}, "evaluation": {"every": 100, "samples": 1, "limit": 2}}
    config = write_config(settings)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command("train", config, f"run_dir={whole}"), cwd=ROOT, check=True)

    process = subprocess.Popen(
        command("train", config, f"run_dir={killed}"), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    metrics = killed / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 6):
        assert process.poll() is None, "the run ended before it was to be ended"
        time.sleep(0.01)
    ranks = [pid for pid, title in tree(process.pid).items() if title.startswith("ray::TrainingWorker")]
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 2
    assert "training rank" in errors
    assert f"rlprims resume {killed}" in errors
    subprocess.run(command("resume", killed), cwd=ROOT, check=True)
    assert metrics_of(killed) == metrics_of(whole)
