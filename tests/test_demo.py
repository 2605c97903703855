"""The main job, as the README starts it: a model trained from scratch gets better by DAPO; the trap does not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlprims.plan.memory import plan
from rlprims.plan.sizes import lengths_of
from rlprims.trainer.config import load_config
from tests.trainer.runs import rlprims

ROOT = Path(__file__).parents[1]
RELEASE = pytest.mark.release


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    script = ROOT / "examples" / "words" / "warm_up.py"
    places = ["--out", str(folder / "base"), "--data", str(folder / "data")]
    subprocess.run([sys.executable, str(script), *places], cwd=folder, check=True)
    return folder


def train(words: Path, run: Path, *settings: str, alone: bool = False) -> dict[str, Any]:
    """The summary of a run of the config of that name, in this process or in one of its own."""
    config = ROOT / "examples" / "words" / f"{run.name}.yaml"
    data = [f"data.{split}={words / 'data' / split}.jsonl" for split in ("train", "eval")]
    places = [f"run_dir={run}", f"model.path={words / 'base'}", *data]
    command = ["train", str(config), *places, *settings]
    if alone:
        subprocess.run([sys.executable, "-m", "rlprims", *command], cwd=ROOT, check=True)
    else:
        rlprims(*command)
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def evaluation(run: Path, step: int) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in lines if line["kind"] == "eval" and line["step"] == step)


def dapo_learns(words: Path, run: Path, steps: int) -> dict[str, Any]:
    """Its summary."""
    dapo = train(words, run, f"steps={steps}", "evaluation.every=40", alone=True)
    assert dapo["after"]["sampled/acc"] - dapo["before"]["sampled/acc"] >= 0.35
    assert dapo["skipped_updates"] == dapo["failed_groups"] == 0
    assert (run / "curves.png").exists()
    config = load_config(run / "config.yaml")
    measured = evaluation(run, step=steps)["memory/local"]
    assert plan(config, lengths_of(config)).peak / 2**30 == pytest.approx(measured, rel=0.25)
    return dapo


@pytest.mark.slow
def test_dapo_learns_in_a_third_of_its_steps(words: Path, tmp_path: Path) -> None:
    dapo_learns(words, tmp_path / "dapo", steps=40)


@pytest.mark.slow
@pytest.mark.release
def test_dapo_learns_and_the_trap_learns_to_be_short(words: Path, tmp_path: Path) -> None:
    dapo = dapo_learns(words, tmp_path / "dapo", steps=120)
    trap = train(words, tmp_path / "trap", "steps=60")
    # Short before right. How soon it is right later depends on rounding, so on the processor: half way is what counts.
    half_way = evaluation(tmp_path / "trap", step=30)
    assert half_way["sampled/length"] < dapo["after"]["sampled/length"]
    assert half_way["sampled/acc"] < dapo["before"]["sampled/acc"] + 0.2
    assert trap["after"]["sampled/acc"] < dapo["after"]["sampled/acc"] - 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ppo", *(pytest.param(name, marks=RELEASE) for name in ("rloo", "remax", "reinforce"))]
)
def test_every_example_learns(words: Path, tmp_path: Path, name: str) -> None:
    """GRPO is the page below, and a real model."""
    summary = train(words, tmp_path / name, "steps=40", "evaluation.every=40")
    assert summary["after"]["sampled/acc"] - summary["before"]["sampled/acc"] >= 0.15


@pytest.mark.slow
def test_the_page_without_a_trainer_learns(words: Path) -> None:
    places = ["--model", str(words / "base"), "--data", str(words / "data" / "train.jsonl"), "--steps", "30"]
    command = [sys.executable, str(ROOT / "examples" / "minimal_grpo.py"), *places]
    printed = subprocess.run(command, cwd=words, check=True, capture_output=True, text=True).stdout
    scores = [float(line.split("score")[1].split()[0]) for line in printed.splitlines()]
    assert len(scores) == 30
    assert sum(scores[-10:]) / 10 >= sum(scores[:3]) / 3 + 0.25
    assert len((ROOT / "examples" / "minimal_grpo.py").read_text().splitlines()) <= 150
