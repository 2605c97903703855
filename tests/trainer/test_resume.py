"""A run that was ended at any moment continues as if it had not been: its metrics are the same, line by line."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlprims.cli import main
from rlprims.runs.directory import RunDirectory
from rlprims.trainer.config import Config
from rlprims.trainer.session import resume, start
from tests.trainer.runs import metrics_of, rlprims

ROOT = Path(__file__).parents[2]
ALGORITHMS: dict[str, Any] = {
    "dapo": None,  # as in the settings: a surplus and a filter
    "ppo": {"preset": "ppo", "group_size": 2, "mini_batches": 2, "epochs": 2,
            "kl_in_reward": {"controller": {"fn": "rlprims.controllers.AdaptiveKL", "target": 0.1, "horizon": 50}}},
    "sao": {"preset": "sao"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "lora", "ahead"),
    [
        ("dapo", None, 0),
        pytest.param("dapo", None, 1, marks=pytest.mark.slow),
        pytest.param("ppo", None, 0, marks=pytest.mark.slow),
        pytest.param("ppo", {"rank": 4}, 0, marks=pytest.mark.slow),
        ("sao", None, 0),
    ],
)
def test_resuming_after_a_checkpoint_repeats_the_run_exactly(
    load: Callable[..., Config],
    settings: dict[str, Any],
    console: Console,
    tmp_path: Path,
    name: str,
    lora: dict[str, Any] | None,
    ahead: int,
) -> None:
    """A run that has ended and gets more steps, too; also with the batch that was sampled with older weights."""
    settings["model"]["lora"], settings["max_staleness"] = lora, ahead
    if ALGORITHMS[name]:
        settings["algorithm"] = ALGORITHMS[name]
    if name == "sao":
        settings["critic"] = {"updates_per_policy_update": 2, "freeze": ["self_attn"], "warmup_steps": 1}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(load(settings, f"run_dir={whole}"), console) == 0

    assert start(load(settings, f"run_dir={broken}", "steps=4"), console) == 0  # checkpoints at 2 and 4
    run = RunDirectory.open(broken)
    # The schedule is constant, so a shorter run is a beginning of the longer one.
    assert resume(run, run.config(Config, ["steps=6"]), console) == 0
    lines = metrics_of(broken)
    shorter_end = [line for line in lines if line["kind"] == "eval" and line["step"] == 4]  # its last evaluation
    assert len(shorter_end) == 1
    assert [line for line in lines if line not in shorter_end] == metrics_of(whole)
    assert (whole / "rollouts" / "step_000006.jsonl").read_text() == (
        broken / "rollouts" / "step_000006.jsonl"
    ).read_text()


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "rlprims", *map(str, arguments)]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        if condition():
            return
        assert process.poll() is None, "the run ended before it was to be ended"
        time.sleep(0.05)
    pytest.fail("the run did not get there in a minute")


@pytest.mark.slow
def test_sigkill_in_mid_run(
    settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    settings |= {"steps": 24, "evaluation": {"every": 12, "samples": 2, "limit": 5}, "checkpoint": {"every": 3}}
    settings["optimizer"] = {"lr": 1e-4}  # slow, so that groups still differ at the end
    config = write_config(settings)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    rlprims("train", config, f"run_dir={whole}")

    process = subprocess.Popen(command("train", config, f"run_dir={killed}"), cwd=ROOT)
    metrics = killed / "metrics.jsonl"
    for lines in (7, 15):
        wait_until(lambda lines=lines: metrics.exists() and metrics.read_text().count("\n") >= lines, process)  # type: ignore[misc]
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = subprocess.Popen(command("resume", killed), cwd=ROOT)
    assert process.wait() == 0
    assert metrics_of(killed) == metrics_of(whole)


_DIE_WHILE_SAVING = """
import os, pathlib, signal, sys
from rlprims.runs import checkpoint
flush, seen = checkpoint.flush, 0
saved = pathlib.Path(sys.argv[-1].partition("=")[2]) / "checkpoints"
def counted(path):
    global seen
    seen += any(not name.startswith(".") for name in os.listdir(saved))
    if seen == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    flush(path)
checkpoint.flush = counted
from rlprims.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_sigkill_in_mid_save(
    settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    config = write_config(settings)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    rlprims("train", config, f"run_dir={whole}")
    # At the fifth file of the second save, when the first is the only whole checkpoint.
    died = subprocess.run(
        [sys.executable, "-c", _DIE_WHILE_SAVING, "train", str(config), f"run_dir={killed}"],
        cwd=ROOT,
        check=False,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert died.returncode == -signal.SIGKILL
    assert died.stderr.splitlines()[-1].endswith(f"; continue it: rlprims resume {killed}"), died.stderr
    assert list((killed / "checkpoints").glob(".writing-*"))
    rlprims("resume", killed)
    assert metrics_of(killed) == metrics_of(whole)
    assert not list((killed / "checkpoints").glob(".writing-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.release) for n in (signal.SIGINT, signal.SIGHUP))]
)
def test_the_first_signal_saves_and_ends(
    settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], tmp_path: Path, number: signal.Signals
) -> None:
    settings |= {"steps": 60, "checkpoint": {"every": 1000}, "data": {"train": settings["data"]["train"]}}
    run = tmp_path / "run"
    heeds = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also if these tests run under nohup
    process = subprocess.Popen(command("train", write_config(settings)), cwd=ROOT, preexec_fn=heeds)
    wait_until(lambda: (run / "metrics.jsonl").exists(), process)
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    done = metrics_of(run)[-1]["step"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    rlprims("resume", run, f"steps={done + 2}")
    assert [line["step"] for line in metrics_of(run)] == list(range(1, done + 3))


@pytest.mark.slow
def test_resume_changes_only_settings_that_it_may(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(settings, "steps=2")
    start(config, console)
    assert main(["resume", str(config.run_dir), "seed=3"]) == 2
    assert "seed=3: on resume only steps" in " ".join(capsys.readouterr().err.split())
    assert main(["resume", str(config.run_dir), "execution=ray"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    export, train = re.search(r"from its weights: rlprims (.*?), then rlprims (.*)", told).groups()  # type: ignore[union-attr]
    folder, new = config.run_dir.parent / "exported", config.run_dir.parent / "new"
    rlprims(*export.replace("FOLDER", str(folder)).split())
    train = train.replace("FOLDER", str(folder)).replace("NEW", str(new)).replace("execution=ray", "execution=local")
    rlprims(*train.split())
    assert [line["step"] for line in metrics_of(new)][-1] == 2


@pytest.mark.slow
def test_resume_keeps_settings_that_a_resume_changed(
    settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path]
) -> None:
    run = Path(settings["run_dir"])
    assert main(["train", str(write_config(settings)), "steps=2", "optimizer.lr=1e-4"]) == 0
    for overrides in (["steps=3", "optimizer.lr=2e-3"], ["steps=4"]):
        os.remove(run / ".lock")  # this process holds it still
        assert main(["resume", str(run), *overrides]) == 0
    rates = [line["lr"] for line in metrics_of(run) if line["kind"] == "train"]
    assert rates == pytest.approx([1e-4, 1e-4, 2e-3, 2e-3])
    assert [json.loads(line) for line in (run / "changes.jsonl").read_text().splitlines()] == [
        {"after_step": 2, "overrides": ["steps=3", "optimizer.lr=2e-3"]},
        {"after_step": 3, "overrides": ["steps=4"]},
    ]


@pytest.mark.slow
def test_one_command_begins_a_run_and_continues_it(
    settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it ended: after a checkpoint, or before the first."""
    run = Path(settings["run_dir"])
    command = ["train", "--resume-if-exists", str(write_config(settings)), "steps=4"]
    assert main(command) == 0
    whole = metrics_of(run)
    for lost, says in (("step_000004", "after step 2 of 4"), ("step_*", "has no checkpoint: it begins again")):
        for checkpoint in (run / "checkpoints").glob(lost):
            shutil.rmtree(checkpoint)
        os.remove(run / ".lock")  # this process holds it still
        capsys.readouterr()
        assert main([*command, "seed=7"]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert says in told
        assert "note: the run keeps its own seed;" in told
        assert metrics_of(run) == whole


def test_a_taken_run_dir_is_refused_before_anything_is_loaded(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(settings)
    monkeypatch.setattr("rlprims.trainer.session.build", None)
    config.run_dir.mkdir()
    (config.run_dir / "notes.txt").touch()
    with pytest.raises(ValueError, match="exists: continue it with 'rlprims resume"):
        start(config, console)
    file = config.run_dir / "notes.txt"
    with pytest.raises(ValueError, match=r"notes.txt cannot be written to; write another place with run_dir="):
        start(config.model_copy(update={"run_dir": file / "run"}), console)


@pytest.mark.slow
def test_exhausted_prompts_lose_nothing_that_was_learned(
    load: Callable[..., Config], settings: dict[str, Any], tmp_path: Path
) -> None:
    console = Console(file=io.StringIO())
    config = load(settings, "algorithm.filter.max_generation_batches=1", "checkpoint.every=100", "steps=200",
                  "prompts_per_generation=5")  # fmt: skip
    with pytest.raises(ValueError, match=r"step \d+: \d of 4 groups after 1 generation batches.*rlprims resume"):
        start(config, console)
    finished = [line["step"] for line in metrics_of(config.run_dir) if line["kind"] == "train"]
    (saved,) = (config.run_dir / "checkpoints").iterdir()
    assert saved.name == f"step_{finished[-1] if finished else 0:06d}"
    run = RunDirectory.open(config.run_dir)
    more = run.config(Config, ["algorithm.filter.max_generation_batches=50", f"steps={(finished or [0])[-1] + 2}"])
    os.remove(config.run_dir / ".lock")  # this process holds it still
    assert resume(run, more, console) == 0
