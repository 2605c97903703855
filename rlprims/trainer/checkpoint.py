"""Checkpoints: a directory with a manifest is whole; anything else is not a checkpoint.

Written aside, flushed to disk, named in a manifest with a hash of each file, and renamed into place: a kill or a full
disk at any moment leaves the previous checkpoint as the newest.
"""

import hashlib
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rlprims.data_proto import DataProto
from rlprims.trainer.writing import writing

_MANIFEST = "manifest.json"
_FORMAT = 3  # 2 had the state of the KL controller alone, 1 neither the collection's nor the version of the weights


def save_checkpoint(
    directory: Path, step: int, write: Callable[[Path], None], *, keep: int, best: int | None = None
) -> Path:
    """``write`` fills an empty directory, which becomes ``directory/step_000123``; ``keep`` newest stay.

    Older ones are removed, except that of step ``best``. A damaged one of this step is written again. Of later steps
    there are only damaged ones, which a resume passed over; they are removed.

    Raises:
        CannotWrite: for example on a full disk; the incomplete checkpoint is removed, the others are unchanged.
    """
    final, aside = directory / f"step_{step:06d}", directory / f".writing-{step}"
    with writing(final):
        directory.mkdir(parents=True, exist_ok=True)
        for unfinished in directory.glob(".writing-*"):
            shutil.rmtree(unfinished)
        if not final.exists() or damage_of(final) is not None:
            try:
                _fill(aside, step, write)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
            if final.exists():
                shutil.rmtree(final)
            aside.rename(final)
            _flush(directory)
            later = [path for path in directory.glob("step_*") if path.name > final.name]
            older = sorted(path for path in directory.glob("step_*") if path.name <= final.name)[:-keep]
            for old in (*later, *older):
                if best is None or old.name != f"step_{best:06d}":
                    shutil.rmtree(old)
    return final


def _fill(aside: Path, step: int, write: Callable[[Path], None]) -> None:
    """All files of a checkpoint, on the disk, and the manifest last."""
    aside.mkdir()
    write(aside)
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    hashes = {str(path.relative_to(aside)): _sha256(path) for path in files}
    manifest = aside / _MANIFEST
    manifest.write_text(json.dumps({"format": _FORMAT, "step": step, "files": hashes}, indent=1))
    for path in [*files, manifest, *(path for path in aside.rglob("*") if path.is_dir()), aside]:
        _flush(path)


def newest_checkpoint(directory: Path, *, warn: Callable[[str], None]) -> Path:
    """The newest complete checkpoint; damaged ones are reported by ``warn`` and skipped.

    Raises:
        ValueError: there is none.
    """
    candidates = sorted(directory.glob("step_*"), reverse=True)
    for candidate in candidates:
        damage = damage_of(candidate)
        if damage is None:
            return candidate
        warn(f"{candidate} is damaged ({damage}): the one before it is used")
    found = f"all of {[path.name for path in candidates]} are damaged" if candidates else "there is none yet"
    raise ValueError(f"no checkpoint in {directory}: {found}")


def damage_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_text())
        files: dict[str, str] = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_MANIFEST}: {error}"
    if manifest.get("format") != _FORMAT:
        return f"format {manifest.get('format')}, this version reads {_FORMAT}"
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file() or not path.resolve().is_relative_to(checkpoint.resolve()):
            return f"{name} is missing"
        if _sha256(path) != expected:
            return f"{name} is not what was written"
    return None


def save_groups(groups: Sequence[DataProto], directory: Path) -> None:
    """Write groups of any sizes into a new directory; neighbours with the same columns share a file."""
    sizes = []
    for number, (_, same) in enumerate(itertools.groupby(groups, key=_columns)):
        together = list(same)
        DataProto.concat(together).save(directory / str(number))
        sizes.append([len(group) for group in together])
    if sizes:
        (directory / "groups.json").write_text(json.dumps(sizes))


def load_groups(directory: Path) -> list[DataProto]:
    """Read the groups that :func:`save_groups` wrote."""
    groups = []
    for number, sizes in enumerate(json.loads((directory / "groups.json").read_text())):
        rows = DataProto.load(directory / str(number))
        groups += [rows[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    return groups


def _columns(group: DataProto) -> list[tuple[Any, ...]]:
    batch = group.batch.items()
    tensors = [(name, column.dtype, () if column.is_nested else tuple(column.shape[1:])) for name, column in batch]
    return sorted([*tensors, *((name, object) for name in group.non_tensor_batch)], key=str)


def save_random_state(directory: Path) -> None:
    """Every global generator: torch's, numpy's and Python's. The trainer draws from none; a verifier may."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    save_file(tensors, directory / "random.safetensors")
    algorithm, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one
    state = {"numpy": [algorithm, np.asarray(keys).tolist(), position, has_gauss, gauss], "python": random.getstate()}
    (directory / "random.json").write_text(json.dumps(state))


def load_random_state(directory: Path) -> None:
    tensors = load_file(directory / "random.safetensors")
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available() and "cuda.0" in tensors:
        torch.cuda.set_rng_state_all([tensors[f"cuda.{i}"] for i in range(len(tensors) - 1)])
    state: dict[str, Any] = json.loads((directory / "random.json").read_text())
    algorithm, keys, *rest = state["numpy"]
    np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002 - the global one
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
