"""Copies of checkpoints at a url: a run goes on from them with the same numbers, whatever ended it or the copying."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from rich.console import Console

from rlprims._storage import local_copy
from rlprims.cli import main
from rlprims.runs.checkpoint import damage_of
from rlprims.runs.directory import RunDirectory
from rlprims.trainer.config import Config
from rlprims.trainer.session import start
from tests.trainer.runs import metrics_of, rlprims, save_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another machine: an empty cache, an empty current folder."""
    monkeypatch.setenv("RLPRIMS_CACHE", str(tmp_path / "cache"))
    local_copy.cache_clear()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}://{tmp_path}/bucket/run"


def steps_at(url: str) -> list[str]:
    fs, root = fsspec.url_to_fs(url)
    return sorted(Path(path).name for path in fs.ls(root, detail=False))


def write_checkpoint(run: Path, step: int, files: dict[str, str]) -> Path:
    """A checkpoint with these files, as a run seals it."""

    def write(folder: Path) -> None:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    (run / "config.yaml").parent.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("seed: 1\n")
    return save_checkpoint(run / "checkpoints", step, write, keep=2)


SHARDS = {
    "policy_shards/shard-00001.safetensors": "a",
    "policy_shards/shard-00002.safetensors": "b",
    "trainer.json": "1",
}


def test_a_run_goes_on_from_its_copy_with_the_same_numbers(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, tmp_path: Path, url: str
) -> None:
    settings["checkpoint"]["keep"] = 1
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(load(settings, f"run_dir={whole}", f"checkpoint.copy_to={url}-whole"), console) == 0
    assert steps_at(f"{url}-whole") == ["step_000006"]

    assert start(load(settings, f"run_dir={broken}", "steps=4", f"checkpoint.copy_to={url}"), console) == 0
    assert steps_at(url) == ["step_000004"]
    shutil.rmtree(broken)

    rlprims("resume", url, "steps=6")
    assert steps_at(url) == ["step_000006"]  # the copies go on
    lines = metrics_of(Path("runs/run"))
    shorter_end = [line for line in lines if line["kind"] == "eval" and line["step"] == 4]
    assert [line for line in lines if line not in shorter_end] == metrics_of(whole)
    assert {line["failed_copies"] for line in lines if line["kind"] == "train"} == {0}
    assert load(settings, f"checkpoint.copy_to={url}").to_yaml().count(url) == 1


@pytest.mark.slow
def test_one_command_continues_a_run_on_an_empty_disk(
    settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], url: str
) -> None:
    """A job that a scheduler begins again elsewhere, also one that ended while its checkpoint was copied."""
    settings["checkpoint"] |= {"keep": 2, "copy_to": url}
    run = Path(settings["run_dir"])
    command = ("train", "--resume-if-exists", write_config(settings), "steps=4")
    rlprims(*command)  # neither here nor there: a new run
    whole, kept = metrics_of(run), steps_at(url)
    assert kept == ["step_000002", "step_000004"]
    fs, root = fsspec.url_to_fs(url)
    for cut in ([], kept[1:], kept):  # the copies of these steps have no manifest: they are not complete
        shutil.rmtree(run)
        run.mkdir()
        for step in cut:
            fs.rm_file(f"{root}/{step}/checkpoints/{step}/manifest.json")
        local_copy.cache_clear()
        rlprims(*command)
        assert metrics_of(run) == whole
        assert steps_at(url) == kept
        assert all(fs.exists(f"{root}/{step}/checkpoints/{step}/manifest.json") for step in kept)


@pytest.mark.slow
def test_model_data_and_replay_by_a_url_give_the_same_run(
    load: Callable[..., Config],
    settings: dict[str, Any],
    console: Console,
    tmp_path: Path,
    model: Path,
    questions: Path,
) -> None:
    plain = tmp_path / "plain"
    assert start(load(settings, f"run_dir={plain}"), console) == 0
    fs = fsspec.filesystem("memory")
    there = f"{tmp_path}/bucket"
    fs.put(str(model), f"{there}/model", recursive=True)
    fs.put_file(str(questions), f"{there}/data/{questions.name}")
    settings["model"]["path"] = f"memory://{there}/model"
    settings["data"] = {"train": f"memory://{there}/data/*.jsonl", "eval": f"memory://{there}/data/{questions.name}"}
    run = tmp_path / "run"
    assert start(load(settings, f"run_dir={run}"), console) == 0
    assert metrics_of(run) == metrics_of(plain)
    text = (run / "config.yaml").read_text()
    assert all(f"memory://{there}/{part}" in text for part in ("model", "data/*.jsonl", f"data/{questions.name}"))

    fs.put(f"{run}/rollouts", f"{there}/recorded/rollouts", recursive=True)
    again = tmp_path / "again"
    assert start(load(settings, f"run_dir={again}", f"replay=memory://{there}/recorded"), console) == 0
    scores = [[line.get("score") for line in metrics_of(r) if line["kind"] == "train"] for r in (run, again)]
    assert scores[0] == scores[1]

    rlprims("data", f"memory://{there}/data/{questions.name}", "--model", f"memory://{there}/model")


def test_a_failed_copy_is_a_warning_is_counted_and_made_up_for(
    load: Callable[..., Config], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the folder should be, until a logger sees the count and removes it."""
    blocked, run = tmp_path / "blocked", tmp_path / "run"
    blocked.mkdir()
    (blocked / "run").write_text("a file")
    monkeypatch.setenv("UNBLOCKED", str(blocked / "run"))
    settings["log_to"] = "tests.trainer.loggers.Unblocks"
    console = Console(file=io.StringIO(), width=200)
    assert start(load(settings, f"run_dir={run}", f"checkpoint.copy_to=file://{blocked}/run"), console) == 0
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "warning: no copy of step_000002 yet: file://" in text
    failed = [line["failed_copies"] for line in metrics_of(run) if line["kind"] == "train"]
    assert failed[0] == 0
    assert failed[-1] == text.count("warning: no copy") > 0
    assert steps_at(f"file://{blocked}/run") == ["step_000002", "step_000004", "step_000006"]
    for name in steps_at(f"file://{blocked}/run"):
        assert damage_of(blocked / "run" / name / "checkpoints" / name) is None


def test_every_file_of_a_checkpoint_with_shards_is_copied(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    write_checkpoint(run, 50, SHARDS)
    (run / "metrics.jsonl").write_text('{"step": 50}\n')
    RunDirectory(run).copy_checkpoints(url, keep=2, best=None)
    fetched = RunDirectory.open(url).path
    assert fetched == Path("runs/run")
    files = {str(path.relative_to(fetched)) for path in fetched.rglob("*") if path.is_file()}
    inner = {f"checkpoints/step_000050/{name}" for name in (*SHARDS, "manifest.json")}
    assert files == inner | {"config.yaml", "metrics.jsonl"}
    assert damage_of(fetched / "checkpoints" / "step_000050") is None


def test_the_newest_and_the_best_remain(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3, 4):
        write_checkpoint(run, step, SHARDS)
        RunDirectory(run).copy_checkpoints(url, keep=2, best=1)
    assert steps_at(url) == ["step_000001", "step_000003", "step_000004"]


def test_a_complete_copy_remains_beside_a_newer_one_that_is_not(tmp_path: Path) -> None:
    """A copy of step 9 was cut off; the run went on from step 1 and saves at other steps."""
    run, url = tmp_path / "run", f"file://{tmp_path}/there"
    (tmp_path / "there/step_000009/checkpoints").mkdir(parents=True)
    for step in (1, 2, 3):
        write_checkpoint(run, step, SHARDS)
        RunDirectory(run).copy_checkpoints(url, keep=1, best=None)
    assert steps_at(url) == ["step_000003", "step_000009"]
    assert [path.name for path in (RunDirectory.open(url).path / "checkpoints").iterdir()] == ["step_000003"]


def test_damaged_copies_are_skipped(tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    for step in (1, 2, 3):
        write_checkpoint(run, step, SHARDS)
        RunDirectory(run).copy_checkpoints(url, keep=3, best=None)
    fs, root = fsspec.url_to_fs(url)
    fs.rm(f"{root}/step_000003/checkpoints/step_000003/manifest.json")  # as if killed before the end
    fs.pipe_file(f"{root}/step_000002/checkpoints/step_000002/trainer.json", b"2")
    assert [path.name for path in (RunDirectory.open(url).path / "checkpoints").iterdir()] == ["step_000001"]
    assert "step_000002 is damaged (trainer.json is not what was written)" in caplog.text

    shutil.rmtree("runs")
    fs.rm(f"{root}/step_000001/checkpoints/step_000001/manifest.json")
    local_copy.cache_clear()
    with pytest.raises(ValueError, match=r"all of .'step_000002'. are damaged"):
        RunDirectory.open(url)
    fs.rm(root, recursive=True)
    assert main(["resume", url]) == 2


@pytest.mark.parametrize("name", ["../../../escaped", "/tmp/escaped"])
def test_a_manifest_cannot_name_files_outside(tmp_path: Path, name: str) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/there"
    write_checkpoint(run, 1, SHARDS)
    RunDirectory(run).copy_checkpoints(url, keep=1, best=None)
    manifest = tmp_path / "there/step_000001/checkpoints/step_000001/manifest.json"
    content = json.loads(manifest.read_text())
    content["files"][name] = content["files"]["trainer.json"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="are damaged"):
        RunDirectory.open(url)
    assert not Path("runs").exists()


def test_a_url_with_a_run_is_refused_before_anything_starts(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, tmp_path: Path, url: str
) -> None:
    write_checkpoint(tmp_path / "other", 1, SHARDS)
    RunDirectory(tmp_path / "other").copy_checkpoints(url, keep=1, best=None)
    settings["model"]["path"] = "/no/such/model"  # not reached
    with pytest.raises(ValueError, match=f"{url}: it has a run: 'rlprims resume {url}', or another checkpoint.copy_to"):
        start(load(settings, f"checkpoint.copy_to={url}"), console)
    assert not (tmp_path / "run").exists()
    with RunDirectory.claim(tmp_path / "another", f"{url}-free"):
        pass
    with pytest.raises(ValueError, match="Protocol not known: nowhere"):
        start(load(settings, "checkpoint.copy_to=nowhere://a"), console)
    with pytest.raises(ValueError, match=r"checkpoint\.copy_to"):
        load(settings, "checkpoint.copy_to=/a/folder")


def test_a_local_run_that_differs_is_not_touched(tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    write_checkpoint(run, 1, SHARDS)
    RunDirectory(run).copy_checkpoints(url, keep=1, best=None)
    fetched = RunDirectory.open(url).path
    assert RunDirectory.open(url).path == fetched  # the same
    write_checkpoint(fetched, 2, SHARDS)
    assert RunDirectory.open(url).path == fetched  # it has gone on
    write_checkpoint(run, 2, {"trainer.json": "other"})
    RunDirectory(run).copy_checkpoints(url, keep=1, best=None)
    with pytest.raises(ValueError, match=r"runs/run exists, and differs from .*: continue it with"):
        RunDirectory.open(url)
    assert (fetched / "checkpoints/step_000002/trainer.json").read_text() == "1"


@pytest.mark.slow
def test_a_run_killed_while_it_copies_goes_on_from_the_copy_before(
    write_config: Callable[[dict[str, Any]], Path], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Its second copy stops at a file; it is killed there, and its disk is lost."""
    there, log, run = tmp_path / "there", tmp_path / "log", tmp_path / "run"
    settings["checkpoint"] |= {"keep": 1, "copy_to": f"slow://{there}"}
    config = write_config(settings)
    code = f"import sys, tests.slow_files; from rlprims.cli import main; sys.exit(main(['train', {str(config)!r}]))"
    environment = {**os.environ, "SLOW_LOG": str(log), "SLOW_STOP": "step_000004/trainer.json"}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    while not log.exists() or "step_000004/trainer.json" not in log.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (there / "step_000004").is_dir()
    assert not list(there.glob("step_000004/checkpoints/*/manifest.json"))
    before = run.rename(tmp_path / "lost")
    code = f"import sys, tests.slow_files; from rlprims.cli import main; sys.exit(main(['resume', 'slow://{there}']))"
    command = [sys.executable, "-c", code]
    path = {"PYTHONPATH": str(ROOT), "SLOW_STOP": ""}
    assert subprocess.run(command, env={**environment, **path}, stdout=subprocess.DEVNULL, check=False).returncode == 0

    lines = metrics_of(Path("runs/there"))
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    killed = [line for line in metrics_of(before) if line["step"] <= 4]
    assert lines[: len(killed)] == killed
    assert steps_at(f"file://{there}") == ["step_000006"]


def test_a_run_goes_on_from_an_s3_server(
    load: Callable[..., Config],
    settings: dict[str, Any],
    console: Console,
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server of others' making, moto's, by the client s3fs; both are installed by hand."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("ENDPOINT_URL", f"http://{host}:{port}")):
        monkeypatch.setenv(f"AWS_{name}", value)
    try:
        fs = fsspec.filesystem("s3")
        fs.mkdir("s3://bucket")
        fs.put(str(model), "bucket/model", recursive=True)
        settings["model"]["path"] = "s3://bucket/model"
        whole, broken, url = tmp_path / "whole", tmp_path / "broken", "s3://bucket/runs/mine"
        assert start(load(settings, f"run_dir={whole}", f"checkpoint.copy_to={url}-whole"), console) == 0
        assert start(load(settings, f"run_dir={broken}", "steps=4", f"checkpoint.copy_to={url}"), console) == 0
        rlprims("resume", url, "steps=6")
        lines = metrics_of(Path("runs/mine"))
        assert [line for line in lines if line["kind"] == "train"] == [
            line for line in metrics_of(whole) if line["kind"] == "train"
        ]
        assert steps_at(url) == ["step_000002", "step_000004", "step_000006"]
        with pytest.raises(ValueError, match="s3://nobucket/x: The specified bucket does not exist"):
            local_copy("s3://nobucket/x")
    finally:
        server.stop()
