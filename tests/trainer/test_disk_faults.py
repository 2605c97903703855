"""A disk that is full: the run says which path, nothing half-written stays, and a resume repeats the rest."""

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from rlprims.runs import checkpoint as checkpoints
from rlprims.runs.checkpoint import damage_of, newest_checkpoint
from rlprims.runs.directory import RunDirectory
from rlprims.runs.disk_errors import CannotWrite
from rlprims.runs.steps import StepResult
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build, resume, start
from tests.trainer.runs import metrics_of, rlprims, save_checkpoint
from tests.trainer.small_disk import run_on_a_small_disk

FULL = Path("/dev/full")  # whatever is written to it meets a full disk


@pytest.fixture
def run(load: Callable[..., Config], settings: dict[str, Any]) -> Iterator[RunDirectory]:
    config = load(settings)
    with RunDirectory.claim(config.run_dir) as run:
        run.begin(config)
        yield run


@pytest.mark.skipif(not FULL.is_char_device(), reason="this system has no /dev/full")
class TestAFullDiskIsNamed:
    def test_metrics(self, run: RunDirectory) -> None:
        (run.path / "metrics.jsonl").symlink_to(FULL)
        with pytest.raises(CannotWrite, match=r"cannot write .*/metrics\.jsonl: .*No space left on device"):
            run.log("train", 1, {"loss": 0.5})

    def test_rollouts(
        self, run: RunDirectory, load: Callable[..., Config], settings: dict[str, Any], console: Console
    ) -> None:
        config = load(settings)
        parts = build(config, console)
        trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
        (run.rollouts / ".writing").symlink_to(FULL)
        with pytest.raises(CannotWrite, match=r"cannot write .*/rollouts/step_000001\.jsonl: .*No space left"):
            run.write_rollouts(trainer.step(), parts.tokenizer)
        assert not list(run.rollouts.glob("step_*"))

    def test_summary(self, run: RunDirectory) -> None:
        (run.path / ".summary.json.writing").symlink_to(FULL)
        with pytest.raises(CannotWrite, match=r"cannot write .*/summary\.json: .*No space left"):
            run.write_json("summary.json", {"steps": 3})
        assert not (run.path / "summary.json").exists()


def test_records_are_written_beside_the_next_step(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step does not wait for them, a checkpoint does, and an error ends the run."""
    del settings["data"]["eval"]
    config = load(settings, "steps=2", "checkpoint.every=2")
    second, found = Event(), list[list[str]]()
    write, step, begin = RunDirectory.write_rollouts, Trainer.step, checkpoints.begin_checkpoint

    def waits(run: RunDirectory, of: StepResult, *args: Any, **options: Any) -> None:
        assert of.number == 2 or second.wait(60)
        write(run, of, *args, **options)

    def begins(trainer: Trainer) -> StepResult:
        if trainer.step_number == 1:
            second.set()
        return step(trainer)

    def checkpoint(*args: Any, **options: Any) -> Callable[[], Path]:
        found.append(sorted(path.name for path in (config.run_dir / "rollouts").iterdir()))
        return begin(*args, **options)

    monkeypatch.setattr(RunDirectory, "write_rollouts", waits)
    monkeypatch.setattr(Trainer, "step", begins)
    monkeypatch.setattr(checkpoints, "begin_checkpoint", checkpoint)
    assert start(config, console) == 0
    assert found == [["step_000001.jsonl", "step_000002.jsonl"]]

    (config.run_dir / "rollouts" / ".writing").symlink_to(FULL)
    more = load(settings, "steps=4", "checkpoint.every=9", f"run_dir={config.run_dir}")
    with pytest.raises(ValueError, match=r"cannot write .*/rollouts/step_000003\.jsonl: .*No space left"):
        resume(RunDirectory.open(config.run_dir), more, console)


def test_a_checkpoint_that_does_not_fit_is_removed_and_the_one_before_stays(tmp_path: Path) -> None:
    def write(size: int) -> Callable[[Path], None]:
        return lambda directory: save_file({"w": torch.zeros(size)}, directory / "w.safetensors")

    save_checkpoint(tmp_path, 1, write(10), keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(CannotWrite, match=r"cannot write .*/step_000002: .*File too large"):
            save_checkpoint(tmp_path, 2, write(1_000_000), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert newest_checkpoint(tmp_path, warn=pytest.fail).name == "step_000001"


def test_a_checkpoint_cut_at_any_byte_is_damaged(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        save_file({"w": torch.arange(8.0)}, directory / "w.safetensors")
        (directory / "trainer.json").write_text(json.dumps({"step_number": 3}))

    whole = save_checkpoint(tmp_path, 3, write, keep=1)
    assert damage_of(whole) is None
    for path in whole.iterdir():
        content = path.read_bytes()
        for size in range(len(content)):
            path.write_bytes(content[:size])
            assert damage_of(whole) is not None, f"{path.name} cut to {size} bytes"
        path.write_bytes(content)
    assert damage_of(whole) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "others"),
    [pytest.param("1500k", False, id="checkpoint"), pytest.param("4m", True, id="anything", marks=pytest.mark.release)],
)
def test_a_run_on_a_disk_that_fills_up_ends_and_goes_on(
    settings: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    size: str,
    others: bool,
) -> None:
    steps = 40 if others else 12  # the second checkpoint does not fit; others need a moment
    settings |= {"steps": steps, "checkpoint": {"every": 2, "keep": 1}, "optimizer": {"lr": 1e-4}}
    settings["evaluation"] = {"every": 20, "samples": 1, "limit": 2}
    config = write_config(settings)
    ended = run_on_a_small_disk(tmp_path / "disk", size, "train", config, others_fill_it=others)
    assert "Traceback" not in ended.errors
    whole = tmp_path / "whole"
    rlprims("train", config, f"run_dir={whole}")
    assert ended.metrics == metrics_of(whole)
