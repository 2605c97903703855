"""A disk that is full: the run says which path, nothing half-written stays, and a resume repeats the rest."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from rlprims.trainer.checkpoint import damage_of, newest_checkpoint, save_checkpoint
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.run_directory import RunDirectory
from rlprims.trainer.session import build
from rlprims.trainer.writing import CannotWrite
from tests.trainer.runs import metrics_of

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")  # whatever is written to it meets a full disk


@pytest.fixture
def run(load: Callable[..., Config], settings: dict[str, Any]) -> RunDirectory:
    return RunDirectory.create(load(settings))


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


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_and_no_ruins(tmp_path: Path) -> None:
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


_ON_A_SMALL_DISK = """
import json, os, subprocess, sys, time
from pathlib import Path
disk, how, *command = sys.argv[1:]
size = "1500k" if how == "checkpoint" else "4m"
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
quiet = {"stdout": subprocess.DEVNULL, "text": True}
process = subprocess.Popen([*command, f"run_dir={disk}/run"], stderr=subprocess.PIPE, **quiet)
if how == "anything":  # something else fills the disk after the first checkpoint
    while not list(Path(disk).glob("run/checkpoints/step_*")) and process.poll() is None:
        time.sleep(0.01)
    with open(f"{disk}/ballast", "wb", buffering=0) as ballast:
        try:
            while process.poll() is None:
                ballast.write(bytes(512))
        except OSError:
            pass
errors = process.communicate()[1]
left = sorted(path.name for path in Path(disk).glob("run/checkpoints/*"))
Path(disk, "ballast").unlink(missing_ok=True)
subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
resumed = subprocess.run([*command[:3], "resume", f"{disk}/run"], **quiet).returncode
metrics = Path(disk, "run", "metrics.jsonl").read_text() if resumed == 0 else ""
json.dump([process.returncode, errors, left, resumed, metrics], sys.stdout)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["checkpoint", "anything"])
def test_a_run_on_a_disk_that_fills_up_ends_and_goes_on(
    settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], tmp_path: Path, how: str
) -> None:
    unshare = ["unshare", "--mount", "--user", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("no mount namespaces here")
    settings |= {"steps": 40, "checkpoint": {"every": 2, "keep": 1}, "optimizer": {"lr": 1e-4}}
    settings["evaluation"] = {"every": 20, "samples": 1, "limit": 2}
    config, disk = write_config(settings), tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, "-m", "rlprims", "train", str(config)]
    script = [*unshare, sys.executable, "-c", _ON_A_SMALL_DISK, str(disk), how, *command]
    answer = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True)
    code, errors, left, resumed, metrics = json.loads(answer.stdout)
    assert code == 2
    assert "Traceback" not in errors
    assert f"cannot write {disk}/run/" in errors
    assert "No space left on device" in errors
    assert f"rlprims resume {disk}/run" in errors
    assert len(left) == 1, "the checkpoint before, and nothing of the one that failed"
    assert resumed == 0
    again = tmp_path / "again"
    again.mkdir()
    (again / "metrics.jsonl").write_text(metrics)
    whole = tmp_path / "whole"
    subprocess.run([*command, f"run_dir={whole}"], cwd=ROOT, check=True)
    assert metrics_of(again) == metrics_of(whole)
