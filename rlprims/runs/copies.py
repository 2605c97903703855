"""Copies of a run at a url: ``URL/step_000050/`` is a run directory with one checkpoint, whose manifest comes last."""

import json
import logging
import shutil
from pathlib import Path, PurePosixPath

from rlprims._storage import local_copy, reached
from rlprims.runs.checkpoint import MANIFEST, damage_of

_OF_RUN = ("config.yaml", "environment.json", "changes.jsonl", "metrics.jsonl", "best.json")


def copy_checkpoints(run: Path, url: str, *, keep: int, best: int | None) -> None:
    """Copy the checkpoints of a run that a url lacks, the newest first; then remove the old ones there."""
    with reached(url) as (fs, root):
        for path in sorted((run / "checkpoints").glob("step_*"), reverse=True):
            there = f"{root}/{path.name}"
            if fs.exists(f"{there}/{path.relative_to(run)}/{MANIFEST}"):
                continue
            names = json.loads((path / MANIFEST).read_text())["files"]
            files = [*filter(Path.exists, (run / name for name in _OF_RUN)), *(path / name for name in names)]
            fs.put([str(file) for file in files], [f"{there}/{file.relative_to(run)}" for file in files])
            fs.put_file(str(path / MANIFEST), f"{there}/{path.relative_to(run)}/{MANIFEST}")
        for old in sorted(fs.glob(f"{root}/step_*"))[:-keep]:
            if not old.endswith(f"step_{best or 0:06d}"):
                fs.rm(old, recursive=True)


def check_free(url: str) -> None:
    """Raise a ValueError if a url cannot be reached, or has a run."""
    with reached(url) as (fs, root):
        if fs.glob(f"{root}/step_*"):
            again = f"continue it with 'rlprims resume {url}', or write another place"
            raise ValueError(f"checkpoint.copy_to names a run: {again}")


def fetch_run(url: str) -> Path:
    """Fetch a run with its newest complete checkpoint into ``runs/NAME``, unless it is there; returns that folder."""
    with reached(url) as (fs, root):
        manifests = sorted(fs.glob(f"{root}/step_*/checkpoints/step_*/{MANIFEST}"), reverse=True)
        if not manifests:
            raise FileNotFoundError("no run with a complete checkpoint is there")
        newest, run = fs.cat_file(manifests[0]), Path("runs", PurePosixPath(root).name)
    steps = [PurePosixPath(manifest).parent.name for manifest in manifests]
    if run.exists():
        mine = run / "checkpoints" / steps[0] / MANIFEST
        if mine.is_file() and mine.read_bytes() == newest:
            return run
        raise ValueError(f"{run} exists, and differs from {url}: continue it with 'rlprims resume {run}', or move it")
    for step in steps:
        copy = Path(local_copy(f"{url.rstrip('/')}/{step}"))
        if (damage := damage_of(copy / "checkpoints" / step)) is None:
            aside = run.with_name(f".{run.name}.writing")
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            shutil.move(copy, aside)
            (aside / "rollouts").mkdir()
            copy.parent.rmdir()  # of the cache
            return aside.rename(run)
        logging.warning("%s/%s is damaged (%s): the one before it is used", url, step, damage)
    raise ValueError(f"{url}: all of {steps} are damaged")
