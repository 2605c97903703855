"""The directory of a run: config, environment, metrics, rollouts, and a lock against a second trainer."""

import fcntl
import json
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from rlprims._storage import local_copy, reached
from rlprims.runs.checkpoint import MANIFEST, damage_of
from rlprims.runs.config import RunConfig, Settings, load_as
from rlprims.runs.disk_errors import writing
from rlprims.runs.records import open_rollouts, record_lines
from rlprims.runs.steps import StepResult

_LOCK = ".lock"
_COPIED = ("config.yaml", "environment.json", "changes.jsonl", "metrics.jsonl", "best.json")


class RunDirectory:
    """``config.yaml``, ``environment.json``, ``metrics.jsonl``, ``rollouts/``, ``checkpoints/``, ``summary.json``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.rollouts = path / "rollouts"
        self._lock: TextIO | None = None

    @classmethod
    @contextmanager
    def claim(cls, path: Path, copy_to: str | None = None) -> Iterator["RunDirectory"]:
        """Lock the directory of a new run; if the block ends before :meth:`begin`, what was made is removed."""
        _check_free(path)
        if copy_to is not None and _manifests(copy_to):
            raise ValueError(f"{copy_to}: it has a run: 'rlprims resume {copy_to}', or another checkpoint.copy_to")
        made = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
        run = cls(path)
        try:
            with writing(path):
                path.mkdir(parents=True, exist_ok=True)
                run.lock()
            yield run
        finally:
            if run._lock is not None and not (path / "config.yaml").exists():
                (path / _LOCK).unlink(missing_ok=True)
                run._lock.close()
                for folder in made:
                    with suppress(OSError):  # another process has written there
                        folder.rmdir()

    def begin(self, config: RunConfig) -> None:
        """Write the first files of a run into its claimed directory."""
        with writing(self.path):
            self.rollouts.mkdir()
            (self.path / "config.yaml").write_text(config.to_yaml())
            self.write_json("environment.json", environment())

    @classmethod
    def open(cls, path: Path | str) -> "RunDirectory":
        """Open the directory of an existing run; that of a url is fetched before, into ``runs/NAME``."""
        if "://" in str(path):
            path = _fetched(str(path).rstrip("/"), Path("runs", Path(path).name))
        path = Path(path)
        if not (path / "config.yaml").is_file():
            raise ValueError(f"{path} is not a run: it has no config.yaml")
        return cls(path)

    @classmethod
    def found(cls, path: Path, copy_to: str | None) -> "RunDirectory | None":
        """The run of a directory; one of which only the copies at a url are left is fetched into it."""
        if not (path / "config.yaml").exists() and copy_to is not None and _manifests(copy_to):
            _fetched(copy_to.rstrip("/"), path)
        return cls(path) if (path / "config.yaml").exists() else None

    def config(self, kind: type[Settings], overrides: Iterable[str] = ()) -> Settings:
        """The settings of the run, with overrides."""
        return load_as(kind, self.path / "config.yaml", list(overrides))

    def record(self, config: RunConfig, step: int, overrides: Iterable[str]) -> None:
        """Use this config from this step on; ``changes.jsonl`` records the changes and the step."""
        self._write("config.yaml", config.to_yaml())
        with writing(self.path / "changes.jsonl"), (self.path / "changes.jsonl").open("a") as file:
            file.write(json.dumps({"after_step": step, "overrides": list(overrides)}) + "\n")

    def lock(self) -> None:
        """Take the lock; it is held until this process ends."""
        while True:
            file = (self.path / _LOCK).open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ValueError(f"{self.path} is in use by process {file.read().strip()}") from None
            if os.fstat(file.fileno()).st_nlink:  # otherwise its owner ended meanwhile, and removed it
                break
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        self._lock = file

    def copy_checkpoints(self, url: str, *, keep: int, best: int | None) -> None:
        """Copy the checkpoints that a url lacks, the newest first, and then remove the old ones there.

        ``URL/step_000050/`` is a run directory with one checkpoint. It is complete with the manifest, which comes last.
        """
        with reached(url) as (fs, root):
            for path in sorted(self.checkpoints.glob("step_*"), reverse=True):
                if fs.exists(f"{root}/{path.name}/checkpoints/{path.name}/{MANIFEST}"):
                    continue
                names = json.loads((path / MANIFEST).read_text())["files"]
                files = [*filter(Path.exists, (self.path / name for name in _COPIED)), *(path / name for name in names)]
                for part in (files, [path / MANIFEST]):
                    fs.put([str(f) for f in part], [f"{root}/{path.name}/{f.relative_to(self.path)}" for f in part])
            oldest = sorted(fs.glob(f"{root}/step_*/checkpoints/step_*/{MANIFEST}"))[-keep:][0]
            for old in fs.glob(f"{root}/step_*"):
                if old < oldest[: len(old)] and not old.endswith(f"step_{best or 0:06d}"):
                    fs.rm(old, recursive=True)

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line to ``metrics.jsonl``; numbers that are not finite are written as null."""
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        path = self.path / "metrics.jsonl"
        with writing(path), path.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **finite}) + "\n")

    def truncate_after(self, step: int) -> None:
        """Remove the lines and files of later steps, which will be repeated from the checkpoint of ``step``."""
        path = self.path / "metrics.jsonl"
        kept = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue  # incomplete, because the process ended
        self._write(path.name, "".join(kept))
        for rollout in self.rollouts.glob("step_*.jsonl*"):
            if int(rollout.name.removeprefix("step_").partition(".")[0]) > step:
                rollout.unlink()

    def write_json(self, name: str, value: Any) -> None:
        self._write(name, json.dumps(value, indent=1))

    def _write(self, name: str, text: str) -> None:
        path, temporary = self.path / name, self.path / f".{name}.writing"
        with writing(path):
            temporary.write_text(text)
            temporary.replace(path)

    def write_rollouts(self, step: StepResult, tokenizer: Any, *, compress: bool = False) -> None:
        """Write all samples of the step, trained, dropped or surplus, one per line."""
        name, end = f"step_{step.number:06d}.jsonl", ".gz" if compress else ""
        path, temporary = self.rollouts / (name + end), self.rollouts / f".writing{end}"
        text_of = cache(lambda token: tokenizer.decode([token]))  # most tokens of a step occur often
        with writing(path):
            with open_rollouts(temporary, "wb") as file:
                surplus = [(rows, "surplus") for rows in step.surplus]
                for rows, status in [(step.batch, "trained"), *step.dropped, *surplus]:
                    lines = record_lines(step.number, rows, status, text_of)
                    file.writelines(json.dumps(line).encode() + b"\n" for line in lines)
            temporary.replace(path)


def _check_free(path: Path) -> None:
    if path.exists() and (not path.is_dir() or {file.name for file in path.iterdir()} - {_LOCK}):
        again = f"continue it with 'rlprims resume {path}'"
        raise ValueError(f"{path} exists: {again}, or write another place with run_dir=...")
    is_in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and not path.is_absolute()  # of ray job submit
    if is_in_job or "working_dir_files" in path.absolute().parts:  # with --working-dir
        where = "in Ray's copy of the job's folder, which Ray removes, or where the cluster was started"
        raise ValueError(f"run_dir={path} is {where}: write an absolute path elsewhere")
    parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise ValueError(f"run_dir={path}: {parent} cannot be written to; write another place with run_dir=...")


def _manifests(url: str) -> list[str]:
    """Those of the complete checkpoints at a url, the newest first."""
    with reached(url) as (fs, root):
        return sorted(fs.glob(f"{root}/step_*/checkpoints/step_*/{MANIFEST}"), reverse=True)


def _fetched(url: str, run: Path) -> Path:
    """``run``, into which a run is fetched from a url with its newest complete checkpoint, unless it is there."""
    steps = [PurePosixPath(manifest).parent.name for manifest in _manifests(url)]
    if not steps:
        raise ValueError(f"{url}: no run with a complete checkpoint is there")
    if run.is_file() or any(run.glob("*")):
        mine = run / "checkpoints" / steps[0] / MANIFEST
        with reached(url) as (fs, root):
            newest = fs.cat_file(f"{root}/{steps[0]}/{mine.relative_to(run)}")
        if mine.is_file() and mine.read_bytes() == newest:
            return run
        raise ValueError(f"{run} exists, and differs from {url}: continue it with 'rlprims resume {run}', or move it")
    for step in steps:
        copy, aside = Path(local_copy(f"{url}/{step}")), run.with_name(f".{run.name}.writing")
        if (damage := damage_of(copy / "checkpoints" / step)) is None:
            (copy / "rollouts").mkdir(exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(copy, aside)
            copy.parent.rmdir()  # of the cache
            return aside.rename(run)
        logging.warning("%s/%s is damaged (%s): the one before it is used", url, step, damage)
    raise ValueError(f"{url}: all of {steps} are damaged")


def environment() -> dict[str, Any]:
    """The versions and the command of the run."""
    packages = ("rlprims", "torch", "tensordict", "numpy", "pydantic", "transformers", "tokenizers", "safetensors")
    versions = dict.fromkeys(packages, "not installed")
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    commit = None
    with suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
        commit = answer.stdout.strip() or None
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "packages": versions,
        "git": commit,
    }
