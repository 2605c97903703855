"""A run on a disk that is too small for it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.trainer.runs import metrics_of

ROOT = Path(__file__).parents[2]
_SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path
disk, size, others, *command = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
quiet = {"stdout": subprocess.DEVNULL, "text": True}
process = subprocess.Popen([*command, f"run_dir={disk}/run"], stderr=subprocess.PIPE, **quiet)
if others:  # something else fills the disk after the first checkpoint
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


class Ended(NamedTuple):
    """What the run said when its disk was full, and its metrics after a resume on a larger one."""

    errors: str
    metrics: list[dict[str, Any]]


def run_on_a_small_disk(disk: Path, size: str, *arguments: str | Path, others_fill_it: bool = False) -> Ended:
    """``rlprims`` with a run directory on a new disk; it ends in words, keeps one checkpoint, and can be resumed."""
    unshare = ["unshare", "--mount", "--user", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("no mount namespaces here")
    disk.mkdir()
    command = [sys.executable, "-m", "rlprims", *map(str, arguments)]
    script = [*unshare, sys.executable, "-c", _SCRIPT, str(disk), size, "yes" if others_fill_it else "", *command]
    answer = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True)
    code, errors, left, resumed, metrics = json.loads(answer.stdout)
    assert code == 2, errors
    assert f"cannot write {disk}/run/" in errors
    assert "No space left on device" in errors
    assert f"rlprims resume {disk}/run" in errors
    assert len(left) == 1, "the checkpoint before, and nothing of the one that failed"
    assert resumed == 0
    again = disk.with_name("again")
    again.mkdir()
    (again / "metrics.jsonl").write_text(metrics)
    return Ended(errors, metrics_of(again))
