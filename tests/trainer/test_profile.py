"""Profiled steps leave a trace with the stages in it, and every step says what its workers did."""

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims.execution import Work, WorkerReport
from rlprims.reports.curves import read_metrics
from rlprims.runs.metrics import worker_metrics
from rlprims.trainer.config import Config
from rlprims.trainer.session import start

STAGES = {"generate", "score", "log_probs", "update", "sync"}


@pytest.mark.slow
def test_the_profiled_steps_and_no_others(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    del settings["data"]["eval"]
    settings["algorithm"] = {"preset": "grpo", "group_size": 3}  # without a filter every step samples
    config = load(settings, "steps=3", "profile.steps=[2]", "checkpoint.every=9")
    assert start(config, console) == 0
    (folder,) = (config.run_dir / "profile").iterdir()
    assert folder.name == "step_000002"
    assert {path.name for path in folder.iterdir()} == {"trainer.json.gz", "trainer.txt"}
    events = json.loads(gzip.decompress((folder / "trainer.json.gz").read_bytes()))["traceEvents"]
    lengths = {event["name"]: event["dur"] for event in events if event.get("name") in STAGES and "dur" in event}
    assert set(lengths) == STAGES
    assert "aten::mm" in (folder / "trainer.txt").read_text()

    lines = read_metrics(config.run_dir)
    assert max(line.get("time/tokens_per_second/local/generate", 0) for line in lines) > 0
    for line in lines:
        assert line["time/tokens_per_second/local/update"] > 0
        assert 0 < line["time/mfu"] < 1
        assert line["memory/local"] > 0.05


def test_metrics_of_two_ranks_and_an_engine() -> None:
    """Two ranks of 100 operations a second: 60 of the 400 that they could have made in 2 and 2 seconds."""
    reports = [
        WorkerReport("training_0", {"update": Work(2.0, 50, 40.0), "log_probs": Work(1.0, 60)}, 100.0, 2**30),
        WorkerReport("training_1", {"update": Work(2.0, 30, 20.0), "weights": Work(1.0)}, 100.0, 2**29),
        WorkerReport("rollout_0", {"generate": Work(0.5, 40)}, 0.0, 2**31),
    ]
    assert worker_metrics(reports) == {
        "memory/training_0": 1.0,
        "memory/training_1": 0.5,
        "memory/rollout_0": 2.0,
        "time/tokens_per_second/training_0/update": 25.0,
        "time/tokens_per_second/training_0/log_probs": 60.0,
        "time/tokens_per_second/training_1/update": 15.0,
        "time/tokens_per_second/rollout_0/generate": 80.0,
        "time/mfu": 0.15,
    }
    assert worker_metrics([]) == {}


def test_a_profile_without_steps_has_two(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    assert load(settings).profile.steps == ()
    assert load(settings | {"profile": {}}).profile.steps == (2, 3)
    config = load(settings, "profile.shapes=true")
    assert (config.profile.steps, Config.model_validate(config.model_dump()).profile.shapes) == ((2, 3), True)


@pytest.mark.parametrize("tool", ["nsys", "memory"])
@pytest.mark.parametrize("execution", ["local", "ray"])
def test_a_tool_of_gpus_needs_one(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, tool: str, execution: str
) -> None:
    if execution == "local" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    config = load(settings, f"profile.tool={tool}", f"execution={execution}")
    with pytest.raises(ValueError, match=f"profile.tool: {tool} is for a GPU, and the run has none: use torch"):
        start(config, console)
    assert not config.run_dir.exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("tool", "files"), [("nsys", set()), ("memory", {"trainer.pickle"})])
def test_tools_of_gpus(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, tool: str, files: set[str]
) -> None:
    config = load(settings, "steps=2", "profile.steps=[2]", f"profile.tool={tool}", "data.eval=null")
    assert start(config, console) == 0
    assert {path.name for path in (config.run_dir / "profile/step_000002").iterdir()} == files
