"""A run on Ray from which something is taken away: nobody stays behind, and a resume repeats the rest."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from tests.trainer.processes import LOOPBACK, alive, listening, tree, until
from tests.trainer.runs import metrics_of, small_run
from tests.trainer.small_disk import run_on_a_small_disk

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
CLUSTER = {"training_workers": 2, "rollout_workers": 1, "engine": "hf", "call_timeout": 60.0}
LOST_HEAD = {"RAY_gcs_rpc_server_reconnect_timeout_s": "15"}  # for which Ray waits a minute


def rlprims(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "rlprims", *map(str, arguments)]


@pytest.fixture(scope="module")
def config(model: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faults")
    settings = small_run(model, questions, directory / "run") | {
        **{"steps": 12, "checkpoint": {"every": 3}, "evaluation": {"every": 100, "samples": 1, "limit": 2}},
        **{"execution": "ray", "ray": CLUSTER, "optimizer": {"lr": 1e-4, "eps": 1e-4}},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))
    return directory / "config.yaml"


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> list[dict[str, Any]]:
    run = config.parent / "undisturbed"
    subprocess.run(rlprims("train", config, f"run_dir={run}"), cwd=ROOT, check=True)
    return metrics_of(run)


class Run:
    """One that has come to its fifth step, after the checkpoint of the third; its processes by what they are."""

    def __init__(self, config: Path, path: Path, *overrides: str) -> None:
        self.path = path
        self.errors: IO[str] = (path.parent / "errors").open("w+")
        train = rlprims("train", config, f"run_dir={path}", *overrides)
        self.process = subprocess.Popen(train, cwd=ROOT, stderr=self.errors, env=os.environ | LOST_HEAD)
        until(self._far_enough, seconds=600, what="five steps")
        self.processes = tree(self.process.pid)

    def _far_enough(self) -> bool:
        metrics = self.path / "metrics.jsonl"
        assert self.process.poll() is None, "the run ended before it was to be ended"
        return metrics.exists() and metrics.read_text().count("\n") >= 6

    def pids(self, pattern: str) -> list[int]:
        return [pid for pid, command in self.processes.items() if re.search(pattern, command)]

    def end(self) -> tuple[int, str]:
        code = self.process.wait(timeout=120)
        self.errors.seek(0)
        return code, self.errors.read()

    def leaves_nobody(self) -> None:
        """Two agents of Ray's own look after logs, and see a minute later that they have nothing to do."""
        part = self.pids(r"^ray::(Training|Rollout)Worker|gcs_server|raylet/raylet|rlprims")
        until(lambda: not alive(part), seconds=30, what=f"the end of {[self.processes[pid] for pid in alive(part)]}")

    def goes_on(self) -> list[dict[str, Any]]:
        subprocess.run(rlprims("resume", self.path), cwd=ROOT, check=True)
        return metrics_of(self.path)


def test_nothing_listens_beyond_loopback_and_a_killed_driver_leaves_nobody(
    config: Path, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = Run(config, tmp_path / "run", "ray.engine=vllm", f"ray.kv_cache_bytes={64 << 20}")
    found = listening(run.processes)
    assert {pid for _, pid in found} >= {*run.pids("^ray::TrainingWorker"), *run.pids("^ray::RolloutWorker")}
    assert [(where, run.processes[pid]) for where, pid in found if where not in LOOPBACK] == []
    run.process.kill()
    run.process.wait()
    run.leaves_nobody()
    subprocess.run(rlprims("resume", run.path, "ray.engine=hf"), cwd=ROOT, check=True)
    for ours, theirs in zip(metrics_of(run.path), undisturbed, strict=True):
        assert ours.pop("kind") == theirs["kind"]
        theirs = {name: value for name, value in theirs.items() if name != "kind"}
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    ("victim", "code", "said"),
    [
        ("rlprims", -signal.SIGKILL, ""),
        ("^ray::TrainingWorker", 2, "training rank"),
        ("gcs_server", 1, "Failed to connect to GCS within 15 seconds"),
        ("raylet/raylet", 2, "rlprims resume"),
    ],
)
def test_what_is_killed_leaves_nobody_and_a_resume_repeats_the_rest(
    config: Path, undisturbed: list[dict[str, Any]], tmp_path: Path, victim: str, code: int, said: str
) -> None:
    run = Run(config, tmp_path / "run")
    assert len(run.pids("^ray::TrainingWorker")) == 2
    os.kill(run.pids(victim)[0], signal.SIGKILL)
    left, errors = run.end()
    assert left == code, errors
    assert said in errors
    assert code != 2 or f"rlprims resume {run.path}" in errors
    run.leaves_nobody()
    assert run.goes_on() == undisturbed


def test_a_rank_that_hangs_is_found_by_the_timeout(
    config: Path, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = Run(config, tmp_path / "run", "ray.call_timeout=10")
    os.kill(run.pids("^ray::TrainingWorker")[0], signal.SIGSTOP)
    begun = time.monotonic()
    code, errors = run.end()
    assert code == 2, errors
    assert time.monotonic() - begun < 60
    assert "training" in errors
    assert f"rlprims resume {run.path}" in errors
    run.leaves_nobody()
    assert run.goes_on() == undisturbed


def test_a_start_that_finds_no_room_midway_says_so(config: Path, tmp_path: Path) -> None:
    """The ranks' pool has its room by then."""
    pool = ("ray.pools={values: {gpus: 64}}", "ray.roles.critic=values", "ray.start_timeout=20")
    command = rlprims("train", config, f"run_dir={tmp_path / 'run'}", *pool)
    run = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert "execution: ray did not start: no room for 1 workers of {'CPU': 1.0, 'GPU': 64.0}" in run.stderr
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_under_the_ranks_ends_the_run_and_a_resume_repeats_the_rest(
    config: Path, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Room for one checkpoint, and not for the shards of a second."""
    ended = run_on_a_small_disk(tmp_path / "disk", "2m", "train", config, "checkpoint.keep=1")
    assert re.search(r"cannot write \S+/run/checkpoints/step_000006: training rank [01] of 2 raised:", ended.errors)
    assert ended.metrics == undisturbed
