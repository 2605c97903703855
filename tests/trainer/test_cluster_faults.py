"""A run on Ray from which something is taken away: nobody stays behind, and a resume repeats the rest."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlprims.execution.hf import export_model
from rlprims.runs.checkpoint import newest_checkpoint
from tests.trainer.processes import LOOPBACK, alive, listening, tree, until
from tests.trainer.runs import metrics_of, small_run
from tests.trainer.shared_cluster import rlprims
from tests.trainer.small_disk import run_on_a_small_disk

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]
CLUSTER = {"training_workers": 2, "rollout_workers": 1, "engine": "hf", "call_timeout": 60.0, "training_timeout": 60.0}
FAULTS = [
    ("^ray::TrainingWorker", signal.SIGKILL, {2}, "of 2 died (its process was killed or crashed: "),
    ("gcs_server", signal.SIGKILL, {2}, "the head of the Ray cluster at"),
    ("raylet/raylet", signal.SIGKILL, {1, 2}, ""),  # Ray ends a driver that writes to the store of a lost node
    ("^ray::TrainingWorker", signal.SIGSTOP, {2}, "answered no ping within 5 s: its process is stopped, or hangs"),
]
"""Which process, the signal, the run's exit codes, and what it says."""


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "rlprims", *map(str, arguments)]


@pytest.fixture(scope="module")
def config(model: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faults")
    settings = small_run(model, questions, directory / "run") | {
        **{"steps": 32, "checkpoint": {"every": 2}, "evaluation": {"every": 100, "samples": 1, "limit": 2}},
        **{"execution": "ray", "ray": CLUSTER, "optimizer": {"lr": 1e-4, "eps": 1e-4}},
        "verifier": "tests.trainer.verifiers.has_a_digit_slowly",
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))
    return directory / "config.yaml"


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> list[dict[str, Any]]:
    run = config.parent / "undisturbed"
    rlprims("train", config, f"run_dir={run}")
    return metrics_of(run)


class Run:
    """One that has written a checkpoint and two steps more, and is slow from then on; its processes by what they are.

    A step then takes seconds: the run does not end in the 10 s after which it says that its head is lost.
    """

    def __init__(self, command: list[str], path: Path, **variables: str) -> None:
        self.path = path
        beyond = self.step() + 4
        self.errors: IO[str] = (path.parent / "errors").open("w+")
        slow = path.parent / "slow"
        slow.unlink(missing_ok=True)
        environment = os.environ | {"SLOW_WHILE": str(slow)} | variables
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=self.errors, env=environment, start_new_session=True)
        until(lambda: self._is_at(beyond), seconds=600, what=f"step {beyond}")
        slow.touch()
        self.processes = tree(self.process.pid)

    def _is_at(self, step: int) -> bool:
        assert self.process.poll() is None, f"the run ended before it was to be ended: {self.end()[1]}"
        return self.step() >= step

    def step(self) -> int:
        metrics = self.path / "metrics.jsonl"
        whole_lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        return json.loads(whole_lines[-1])["step"] if whole_lines else 0

    def trains_while_it_writes(self) -> int | None:
        """The step of the checkpoint that is being written, if there is one, and a later step is done."""
        writing = [int(path.name.removeprefix(".writing-")) for path in (self.path / "checkpoints").glob(".writing-*")]
        return writing[0] if writing and self.step() > writing[0] else None

    def pids(self, pattern: str) -> list[int]:
        return [pid for pid, command in self.processes.items() if re.search(pattern, command)]

    def interrupt(self) -> None:
        """Ctrl-C: a terminal sends it to every process of its group, the ranks and engines too."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        code = self.process.wait(timeout=120)
        self.errors.seek(0)
        return code, self.errors.read()

    def leaves_nobody(self) -> None:
        """Two agents of Ray's own look after logs, and see a minute later that they have nothing to do."""
        part = self.pids(r"^ray::(Training|Rollout)Worker|gcs_server|raylet/raylet|rlprims")
        until(lambda: not alive(part), seconds=30, what=f"the end of {[self.processes[pid] for pid in alive(part)]}")


def test_nothing_listens_beyond_loopback_and_a_killed_driver_leaves_nothing(
    config: Path, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    path, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    start = command("train", config, f"run_dir={path}", "ray.engine=vllm", f"ray.kv_cache_bytes={64 << 20}")
    run = Run(start, path, TMPDIR=str(temporary), RAY_TMPDIR="/tmp")
    assert list(temporary.glob("*/vllm*"))
    found = listening(run.processes)
    assert {pid for _, pid in found} >= {*run.pids("^ray::TrainingWorker"), *run.pids("^ray::RolloutWorker")}
    assert [(where, run.processes[pid]) for where, pid in found if where not in LOOPBACK] == []
    run.process.kill()
    run.process.wait()
    run.leaves_nobody()
    until(lambda: not list(temporary.iterdir()), seconds=30, what=f"no file of an engine's in {temporary}")
    rlprims("resume", run.path, "ray.engine=hf")
    for ours, theirs in zip(metrics_of(run.path), undisturbed, strict=True):
        assert ours.pop("kind") == theirs["kind"]
        theirs = {name: value for name, value in theirs.items() if name != "kind"}
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    "faults",
    [[FAULTS[0], FAULTS[1], FAULTS[3]], pytest.param(FAULTS, marks=pytest.mark.release)],
    ids=["three", "and the node"],
)
def test_lost_processes_leave_no_others_and_a_resume_repeats_the_rest(
    config: Path, undisturbed: list[dict[str, Any]], tmp_path: Path, faults: list[tuple[str, int, set[int], str]]
) -> None:
    """One run that loses a rank, Ray's head and its node; at last a rank hangs, which answers no ping."""
    path = tmp_path / "run"
    start = command("train", config, f"run_dir={path}")
    for number, (victim, sent, codes, said) in enumerate(faults):
        run = Run(start, path)
        assert len(run.pids("^ray::TrainingWorker")) == 2
        begun = time.monotonic()
        os.kill(run.pids(victim)[0], sent)
        left, errors = run.end()
        assert left in codes, f"{victim}: {errors}"
        assert said in errors
        until(lambda run=run: f": rlprims resume {path}\n" in run.end()[1], seconds=10, what="how to continue")  # type: ignore[misc]
        assert sent != signal.SIGSTOP or time.monotonic() - begun < 60
        run.leaves_nobody()
        hangs_next = number + 1 < len(faults) and faults[number + 1][1] == signal.SIGSTOP
        start = command("resume", path, f"ray.heartbeat_timeout={10 if hangs_next else 60}")
    rlprims("resume", path, "ray.heartbeat_timeout=60")
    assert metrics_of(path) == undisturbed


@pytest.mark.release
def test_a_death_while_a_checkpoint_is_written_leaves_the_one_before(
    config: Path, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Of the driver, and of a rank; training goes on while the disk takes its time."""
    path, slow = tmp_path / "run", tmp_path / "slow-disk"
    places = [str(Path(__file__).with_name("slow_disk")), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    variables = {"SLOW_DISK": str(slow), "PYTHONPATH": os.pathsep.join(places)}
    start = command("train", config, f"run_dir={path}")
    for victim, code in (("rlprims", -signal.SIGKILL), ("^ray::TrainingWorker", 2)):
        run = Run(start, path, **variables)
        slow.touch()
        until(lambda run=run: run.trains_while_it_writes() is not None, seconds=120, what="a step beyond a save")  # type: ignore[misc]
        step = run.trains_while_it_writes()
        os.kill(run.pids(victim)[0], signal.SIGKILL)
        left, errors = run.end()
        assert left == code, errors
        run.leaves_nobody()
        assert step is not None
        assert newest_checkpoint(path / "checkpoints", warn=pytest.fail).name == f"step_{step - 2:06d}"
        assert bool(list((path / "checkpoints").glob(".writing-*"))) == (code != 2), "an error removes it"
        slow.unlink()
        start = command("resume", path)
    subprocess.run(start, cwd=ROOT, check=True)
    assert metrics_of(path) == undisturbed


def ends_with_a_checkpoint(run: Run) -> None:
    run.interrupt()
    code, errors = run.end()
    assert code == 130, errors
    done = metrics_of(run.path)[-1]["step"]
    assert newest_checkpoint(run.path / "checkpoints", warn=pytest.fail).name == f"step_{done:06d}"
    run.leaves_nobody()


def test_ctrl_c_ends_a_run_after_its_step(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    ends_with_a_checkpoint(Run(command("train", config, f"run_dir={path}"), path))


@pytest.mark.release
def test_ctrl_c_while_a_checkpoint_is_written(config: Path, undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    """The first waits until a checkpoint of the last step is whole. The second leaves the one before."""
    path, slow = tmp_path / "run", tmp_path / "slow-disk"
    places = [str(Path(__file__).with_name("slow_disk")), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    run = Run(
        command("train", config, f"run_dir={path}"), path, SLOW_DISK=str(slow), PYTHONPATH=os.pathsep.join(places)
    )
    slow.touch()
    until(lambda: run.trains_while_it_writes() is not None, seconds=120, what="a step beyond a save")
    step = run.trains_while_it_writes()
    assert step is not None
    run.interrupt()
    time.sleep(1.0)
    assert run.process.poll() is None, "it finishes its step and its checkpoints"
    begun = time.monotonic()
    run.interrupt()
    code, errors = run.end()
    assert (code, time.monotonic() - begun < 30) == (130, True), errors
    run.leaves_nobody()
    assert newest_checkpoint(path / "checkpoints", warn=pytest.fail).name == f"step_{step - 2:06d}"

    slow.unlink()
    ends_with_a_checkpoint(Run(command("resume", path), path))
    rlprims("resume", path)
    assert metrics_of(path) == undisturbed


@pytest.mark.release
def test_ctrl_c_while_weights_are_sent(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stands still meanwhile. The first waits for it, and ends after the step; the second ends the run."""
    path, gate = tmp_path / "run", tmp_path / "slow"  # Run makes this file
    changed = (
        "algorithm={preset: grpo, group_size: 3}",
        "verifier=tests.trainer.verifiers.has_a_digit_behind_a_gate",
        "evaluation.before_training=false",
        "steps=20",
    )
    start = command("train", config, f"run_dir={path}", *changed)
    for presses in (1, 2):
        run = Run(start, path, GATE=str(gate))
        until(gate.with_suffix(".seen").exists, seconds=60, what="scores of a step")
        before = run.step()
        engine = run.pids("^ray::RolloutWorker")[0]
        os.kill(engine, signal.SIGSTOP)  # the responses are there, and nothing needs it until the weights come
        gate.unlink()
        gate.with_suffix(".seen").unlink()
        time.sleep(5.0)
        assert run.step() == before, "the weights do not arrive"
        begun = time.monotonic()
        run.interrupt()
        time.sleep(1.0)
        assert run.process.poll() is None
        if presses == 2:
            run.interrupt()
        else:
            os.kill(engine, signal.SIGCONT)
        code, errors = run.end()
        assert (code, time.monotonic() - begun < 40) == (130, True), errors
        run.leaves_nobody()
        done = before + (presses == 1)
        assert run.step() == done
        if presses == 1:
            assert newest_checkpoint(path / "checkpoints", warn=pytest.fail).name == f"step_{done:06d}"
        start = command("resume", path)
    monkeypatch.setenv("GATE", str(gate))
    rlprims("resume", path)
    assert [line["step"] for line in metrics_of(path) if line["kind"] == "train"] == list(range(1, 21))


@pytest.mark.release
@pytest.mark.parametrize("who", ["^ray::TrainingWorker", "^ray::RolloutWorker"])
def test_a_second_ctrl_c_ends_a_run_that_waits_for_a_worker(config: Path, tmp_path: Path, who: str) -> None:
    """A rank that is stopped holds an update, an engine the responses: long before a limit of theirs."""
    path = tmp_path / "run"
    run = Run(command("train", config, f"run_dir={path}"), path)
    for pid in run.pids(who):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5.0)
    run.interrupt()
    time.sleep(1.0)
    assert run.process.poll() is None
    begun = time.monotonic()
    run.interrupt()
    code, errors = run.end()
    assert (code, time.monotonic() - begun < 40) == (130, True), errors  # Ray's own end takes most of it
    run.leaves_nobody()


@pytest.mark.release
def test_the_last_checkpoint_has_a_model_and_of_others_one_is_made(
    config: Path, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    run, other = config.parent / "undisturbed", tmp_path / "run"
    before, last = sorted((run / "checkpoints").iterdir())
    assert (last / "policy").is_dir()
    assert not (before / "policy").exists()
    shutil.copytree(run, other)
    shutil.rmtree(other / "checkpoints" / last.name / "policy")
    export_model(other / "checkpoints" / last.name / "policy", tmp_path / "made")
    subprocess.run(command("export", run, tmp_path / "copied"), cwd=ROOT, check=True)
    made, copied = (load_file(tmp_path / name / "model.safetensors") for name in ("made", "copied"))
    assert made.keys() == copied.keys()
    assert all(torch.equal(made[name], copied[name]) for name in made)

    shutil.rmtree(other / "checkpoints" / last.name)
    step = before.name.removeprefix("step_").lstrip("0")
    subprocess.run(command("export", run, tmp_path / "before", "--step", step), cwd=ROOT, check=True)
    said = []
    for what in ([other], [config, f"model.path={tmp_path / 'before'}"]):
        evaluation = command("eval", *what, "execution=local")
        ended = subprocess.run(evaluation, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        said.append([line for line in ended.stdout.splitlines() if "acc" in line or "length" in line])
    assert said[0]
    assert said[0] == said[1]
    assert not list((other / "checkpoints").glob(".*"))
    evaluation = command("eval", config, "execution=local", f"model.path={before / 'policy'}")
    refused = subprocess.run(evaluation, cwd=ROOT, check=False, stderr=subprocess.PIPE, text=True)
    assert refused.returncode == 2
    assert f"rlprims export {run} {before / 'policy'} --step {step} --model policy" in refused.stderr


@pytest.mark.release
def test_ctrl_c_during_the_start_says_what_it_ended(config: Path, tmp_path: Path) -> None:
    """A terminal sends it to every process of its group, the ranks too."""
    start = command("train", config, f"run_dir={tmp_path / 'run'}")
    run = subprocess.Popen(start, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout is not None
    said = [run.stdout.readline() for _ in range(2)]
    assert [line.partition(" ")[0] for line in said] == ["ray:", "ray:"]
    time.sleep(2.0)  # the ranks are loading
    processes = tree(run.pid)
    os.killpg(run.pid, signal.SIGINT)
    told = run.communicate(timeout=120)[0]
    assert run.returncode == 130
    assert told.splitlines()[-1] == "stopped during the start: there is no run yet"
    assert not (tmp_path / "run").exists()
    part = [pid for pid, command in processes.items() if re.search(r"^ray::|gcs_server|raylet/raylet|rlprims", command)]
    until(lambda: not alive(part), seconds=30, what=f"the end of {[processes[pid] for pid in alive(part)]}")


@pytest.mark.release
def test_a_head_that_is_lost_during_the_start_is_told_in_a_line(config: Path, tmp_path: Path) -> None:
    """Ray itself waits for it for a minute."""
    start = command("train", config, f"run_dir={tmp_path / 'run'}")
    run = subprocess.Popen(start, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    said = [run.stdout.readline() for _ in range(2)]
    assert [line.partition(" ")[0] for line in said] == ["ray:", "ray:"]
    processes = tree(run.pid)
    os.kill(next(pid for pid, command in processes.items() if "gcs_server" in command), signal.SIGKILL)
    begun = time.monotonic()
    errors = run.communicate(timeout=120)[1]
    assert time.monotonic() - begun < 50
    assert run.returncode == 2, errors
    assert re.fullmatch(
        r"the logs of .*/logs\nerror: execution: ray did not start: the head of the Ray cluster at \S+ was lost: .*\n",
        errors,
    )
    assert not (tmp_path / "run").exists()
    part = [pid for pid, command in processes.items() if re.search(r"^ray::\w+Worker|raylet/raylet|rlprims", command)]
    until(lambda: not alive(part), seconds=30, what=f"the end of {[processes[pid] for pid in alive(part)]}")


@pytest.mark.release
def test_a_start_that_finds_no_room_midway_says_so(config: Path, tmp_path: Path) -> None:
    """The ranks' pool has its devices by then."""
    pool = ("ray.pools={values: {gpus: 64}}", "ray.roles.critic=values", "ray.start_timeout=20")
    start = command("train", config, f"run_dir={tmp_path / 'run'}", *pool)
    run = subprocess.run(start, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert "execution: ray did not start: no room for 1 workers of {'CPU': 1.0, 'GPU': 64.0}" in run.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.release
def test_an_engine_that_does_not_start_is_told_in_a_line(config: Path, tmp_path: Path) -> None:
    """By vLLM's own words; its traceback is in a file."""
    wrong = ("ray.engine=vllm", f"ray.kv_cache_bytes={64 << 20}", "ray.engine_options={block_size: 17}")
    start = command("train", config, f"run_dir={tmp_path / 'run'}", *wrong)
    environment = os.environ | {"TMPDIR": str(tmp_path), "RAY_TMPDIR": "/tmp"}
    run = subprocess.run(start, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert run.returncode == 2, run.stderr
    kept, told, where = run.stderr.splitlines()
    assert list(Path(kept.partition(" are kept: ")[2]).glob("worker-*")), kept
    assert told.startswith("error: execution: ray did not start: rollout worker 0 of 1: No common block size for 17")
    assert "_vllm.py" in Path(where.removeprefix("details: ")).read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.release
def test_a_disk_that_fills_up_under_the_ranks_ends_the_run_and_a_resume_repeats_the_rest(
    config: Path, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Room for one checkpoint, and not for the shards of a second."""
    ended = run_on_a_small_disk(tmp_path / "disk", "1600k", "train", config, "checkpoint.keep=1")
    assert re.search(
        r"cannot write \S+/run/checkpoints/step_000004: training rank [01] of 2: .*No space left", ended.errors
    )
    assert len(ended.errors.splitlines()) < 10, "no traceback's lines"
    assert ended.metrics == undisturbed
