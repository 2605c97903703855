"""``examples/sweep.py``: real processes, one of which fails, and the sweep that goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.sweep import choices_of, main, runs_of

SCRIPT = Path(__file__).parents[2] / "examples" / "sweep.py"
WriteConfig = Callable[[dict[str, Any]], Path]


def rows_of(text: str) -> list[list[str]]:
    """The cells of the table; a long one has further lines."""
    lines = [line.strip("│").split("│") for line in text.splitlines() if line.startswith("│")]
    return [cells for line in lines if (cells := [cell.strip() for cell in line])[0]]


@pytest.mark.slow
def test_a_failed_run_is_a_row_and_the_rest_goes_on(
    settings: dict[str, Any], write_config: WriteConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "gate.py").write_text(
        "from pathlib import Path\nfrom tests.trainer.verifiers import has_a_digit\n"
        "def reward(response, answer, *, strict: bool = False):\n"
        f"    if strict and not Path({str(tmp_path / 'open')!r}).exists():\n        raise OSError('no server')\n"
        "    return has_a_digit(response, answer)\n"
    )
    settings["verifier"] = {"fn": "gate.py:reward"}
    config = write_config(settings)
    values = ["verifier.strict=false,true", "optimizer.lr=1.0e-3,2.0e-3", "steps=2"]
    asked = [str(config), *values, "--parallel=2"]
    assert main(asked) == 1
    base = Path(settings["run_dir"])
    names = {f"verifier.strict={strict},optimizer.lr={lr}" for strict in (True, False) for lr in (0.001, 0.002)}
    assert {path.name for path in base.iterdir() if path.is_dir()} == names
    out = capsys.readouterr().out
    rows = rows_of(out)
    assert [row[:2] for row in rows] == [["false", "0.001"], ["false", "0.002"], ["true", "0.001"], ["true", "0.002"]]
    for run, row in zip(sorted(names), rows, strict=True):
        summary = base / run / "summary.json"
        assert summary.exists() == (row[0] == "false")
        if summary.exists():
            assert row[2:4] == ["sampled/acc", f"{json.loads(summary.read_text())['after']['sampled/acc']:.4g}"]
            assert row[6] == "2"
            assert row[-1] == ""
        else:
            assert row[-1].startswith("error: step 1: none of")
    assert (base / "curves.png").exists()
    kept = (base / "verifier.strict=False,optimizer.lr=0.001/metrics.jsonl").read_text()
    (tmp_path / "open").touch()
    assert main(asked) == 0
    assert (base / "verifier.strict=False,optimizer.lr=0.001/metrics.jsonl").read_text() == kept
    out = capsys.readouterr().out
    assert [row[-1] for row in rows_of(out)] == [""] * 4


@pytest.mark.slow
def test_an_interrupted_sweep_leaves_no_process(settings: dict[str, Any], write_config: WriteConfig) -> None:
    config = write_config(settings | {"steps": 10_000, "verifier": "tests.trainer.verifiers.has_a_digit"})
    sweep = subprocess.Popen([sys.executable, str(SCRIPT), str(config), "seed=0,1", "--parallel=2"])
    base = Path(settings["run_dir"])
    wait = time.monotonic() + 240
    while len(list(base.glob("*/metrics.jsonl"))) < 2 and time.monotonic() < wait:
        time.sleep(0.2)
    owners = [int((base / f"seed={seed}/.lock").read_text()) for seed in (0, 1)]
    sweep.send_signal(signal.SIGTERM)
    assert sweep.wait(timeout=240) == 130
    for owner in owners:
        with pytest.raises(ProcessLookupError):
            os.kill(owner, 0)
    assert list(base.glob("*/checkpoints/step_*/manifest.json"))  # they saved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["seed=0,x"], "seed=x: "),
        (["optimizer.rate=1,2"], "optimizer.rate=1: "),
        (["seed=0,0"], "two runs would have the same values"),
        (["seed={,1"], "'seed={,1': write key=a,b,c"),
    ],
)
def test_nothing_starts_if_one_is_wrong(
    changes: list[str],
    message: str,
    settings: dict[str, Any],
    write_config: WriteConfig,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(write_config(settings)), *changes]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path(settings["run_dir"]).exists()


def test_values_are_yaml(settings: dict[str, Any], write_config: WriteConfig) -> None:
    from rlprims.runs.config import load_as
    from rlprims.trainer.config import Config

    choices = choices_of(["optimizer.betas=[0.9, 0.99],[0.8, 0.9]", "model.lora=null,{rank: 4}", "optimizer.lr=1e-6"])
    runs = runs_of(choices, lambda overrides: load_as(Config, write_config(settings), overrides))
    found = [(config.optimizer.betas, config.model.lora and config.model.lora.rank) for _, config in runs.values()]
    assert found == [((0.9, 0.99), None), ((0.9, 0.99), 4), ((0.8, 0.9), None), ((0.8, 0.9), 4)]
    assert {config.optimizer.lr for _, config in runs.values()} == {1e-6}
    assert all(run == config.run_dir and run.parent == Path(settings["run_dir"]) for run, (_, config) in runs.items())
    assert yaml.safe_load(next(iter(runs.values()))[1].to_yaml())["optimizer"]["betas"] == [0.9, 0.99]
