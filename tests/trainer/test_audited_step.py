"""``audit=true``: the first step of a run, and after a resume the next one, is audited with its own columns."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlprims.cli import main
from tests.trainer.runs import rlprims

WriteConfig = Callable[[dict[str, Any]], Path]


def test_the_first_step_is_named_and_after_a_resume_the_next(
    settings: dict[str, Any], write_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    settings |= {"algorithm": {"preset": "grpo", "group_size": 3}, "prompts_per_generation": None}
    run = Path(settings["run_dir"])
    rlprims("train", write_config(settings), "steps=2", "audit=true")
    said = capsys.readouterr().out
    assert said.count("audit of step") == 1
    assert "audit of step 1 of run: " in said
    told = json.loads((run / "audit.json").read_text())
    assert told["stages"]["advantages"]["said"].startswith("advantage.grpo")
    assert [finding for finding in told["findings"] if finding["severity"] == "error"] == []
    assert "step 1 of run" in (run / "audit.html").read_text()
    rlprims("resume", run, "steps=3")
    assert "audit of step 3 of run: " in capsys.readouterr().out
    assert "step 3 of run" in (run / "audit.html").read_text()
    assert main(["audit", str(run)]) == 0
    assert "advantages: advantage.grpo" in capsys.readouterr().out


def test_it_is_off_by_default(settings: dict[str, Any], write_config: WriteConfig) -> None:
    rlprims("train", write_config(settings), "steps=1", "evaluation.before_training=false")
    assert not (Path(settings["run_dir"]) / "audit.html").exists()
