"""Checkpoints: directories of files with a manifest, which has a hash of each file.

A checkpoint is written under another name and flushed to disk. Its manifest is written last, and then the directory is
renamed. So if the run is killed or the disk is full, the previous checkpoint is still the newest. Only the copy of the
state interrupts training. A thread can do the rest: see :class:`Background`.
"""

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rlprims._event_loop import in_daemon
from rlprims._files import flush, sha256
from rlprims.data_proto import DataProto
from rlprims.execution import Finish
from rlprims.runs.disk_errors import writing

MANIFEST = "manifest.json"
_FORMAT = 3  # format 2 had only the KL controller's state; 1 lacked the collection's and the weights' version


class Background:
    """Runs tasks in a thread, one at a time. The next call of a method raises the error of a failed task."""

    def __init__(self) -> None:
        self._task: Future[object] | None = None

    def begin(self, task: Callable[[], object]) -> None:
        """Wait for the task before, and start a task."""
        self.wait()
        self._task = in_daemon(task, Future())

    def check(self) -> None:
        """Raise the task's error, if the task has failed. Does not wait for a running task."""
        if self._task is not None and self._task.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the task has ended, and raise its error."""
        if self._task is not None:
            task = self._task
            task.exception()  # this waits; after Ctrl-C the task is still known
            self._task = None
            task.result()


def begin_checkpoint(
    directory: Path, step: int, write: Callable[[Path], Finish | None], *, keep: int, best: int | None = None
) -> Callable[[], Path]:
    """Copy the state, and return the function that completes ``directory/step_000123``. Another thread may call it.

    A damaged checkpoint of this step is written again; those of later steps, which the resume has skipped, are removed.
    If the disk is full, both raise CannotWrite; the incomplete checkpoint is removed, and the others are unchanged.

    Args:
        write: writes files into an empty directory. If other files are still being written when it returns, it returns
            a function that waits for them, and returns their hashes by path. Otherwise it returns None.
        keep: the number of checkpoints to keep. Older ones are removed, except that of the step ``best``.
    """
    final, aside = directory / f"step_{step:06d}", directory / f".writing-{step}"
    with writing(final):
        directory.mkdir(parents=True, exist_ok=True)
        for unfinished in directory.glob(".writing-*"):
            shutil.rmtree(unfinished)
        if final.exists() and damage_of(final) is None:
            return lambda: final
        with _removed_if_it_fails(aside):
            aside.mkdir()
            rest = write(aside)

    def finish() -> Path:
        with writing(final):
            with _removed_if_it_fails(aside):
                _seal(aside, step, rest() if rest is not None else {})
            if final.exists():
                shutil.rmtree(final)
            aside.rename(final)
            flush(directory)
            later = [path for path in directory.glob("step_*") if path.name > final.name]
            older = sorted(path for path in directory.glob("step_*") if path.name <= final.name)[:-keep]
            for old in (*later, *older):
                if best is None or old.name != f"step_{best:06d}":
                    shutil.rmtree(old)
        return final

    return finish


@contextmanager
def _removed_if_it_fails(aside: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _seal(aside: Path, step: int, known: Mapping[str, str]) -> None:
    """Write the manifest of a checkpoint, and flush all files to the disk. ``known`` has hashes, by path."""
    if lost := [name for name in known if not (aside / name).is_file()]:
        raise OSError(f"{lost[0]} is not here, where the trainer runs: all nodes must share the disk of run_dir")
    files = {**_files_of(aside), **{name: aside / name for name in known}}
    hashes = {name: known.get(name) or sha256(path) for name, path in sorted(files.items())}
    manifest = aside / MANIFEST
    manifest.write_text(json.dumps({"format": _FORMAT, "step": step, "files": hashes}, indent=1))
    for path in [*files.values(), manifest, *(path for path in aside.rglob("*") if path.is_dir()), aside]:
        flush(path)


def _files_of(directory: Path) -> dict[str, Path]:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path for path in paths}


def add_models(checkpoint: Path) -> None:
    """Write the Hugging Face models that a checkpoint with shards lacks. The checkpoint is valid at any moment."""
    from rlprims.execution.hf import export_model, models_in_shards  # here, because it imports transformers

    manifest = checkpoint / MANIFEST
    with writing(checkpoint):
        content = json.loads(manifest.read_text())
        missing = [name for name in models_in_shards(checkpoint) if f"{name}/config.json" not in content["files"]]
        if not missing:
            return
        for name in missing:
            final, aside = checkpoint / name, checkpoint / f".writing-{name}"
            for unfinished in (final, aside):
                shutil.rmtree(unfinished, ignore_errors=True)
            with _removed_if_it_fails(aside):
                export_model(final, aside)
                files = _files_of(aside)
                content["files"] |= {f"{name}/{path}": sha256(files[path]) for path in files}
                for path in (*files.values(), aside):
                    flush(path)
            aside.rename(final)
        new = checkpoint / f".{MANIFEST}.writing"
        new.write_text(json.dumps(content, indent=1))
        flush(new)
        new.replace(manifest)
        flush(checkpoint)


@contextmanager
def policy_of(checkpoint: Path) -> Iterator[Path]:
    """The folder of the policy as a Hugging Face model. If the checkpoint has only shards, the folder is temporary."""
    from rlprims.execution.hf import export_model

    policy = checkpoint / "policy"
    if policy.is_dir():
        yield policy
        return
    with writing(checkpoint.parent):
        scratch = TemporaryDirectory(prefix=".policy-", dir=checkpoint.parent)
    with scratch as folder:
        policy = Path(folder, "policy")
        with writing(policy):
            export_model(checkpoint / "policy", policy)
        yield policy


def newest_checkpoint(directory: Path, *, warn: Callable[[str], None]) -> Path:
    """Return the newest complete checkpoint. Damaged ones are skipped, and ``warn`` reports them."""
    candidates = sorted(directory.glob("step_*"), reverse=True)
    for candidate in candidates:
        damage = damage_of(candidate)
        if damage is None:
            return candidate
        warn(f"{candidate} is damaged ({damage}): the one before it is used")
    found = f"all of {[path.name for path in candidates]} are damaged" if candidates else "there is none yet"
    raise ValueError(f"no checkpoint in {directory}: {found}")


def damage_of(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None if it is complete."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        files: dict[str, str] = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {error}"
    if manifest.get("format") != _FORMAT:
        return f"format {manifest.get('format')}, this version reads {_FORMAT}"
    for name in files:
        path = checkpoint / name
        if not path.is_file() or not path.resolve().is_relative_to(checkpoint.resolve()):
            return f"{name} is missing"
    with ThreadPoolExecutor() as threads:  # reading and hashing release the GIL
        hashes = threads.map(lambda name: sha256(checkpoint / name), files)
        changed = [name for name, found in zip(files, hashes, strict=True) if found != files[name]]
    return f"{changed[0]} is not what was written" if changed else None


def save_groups(groups: Sequence[DataProto], directory: Path) -> None:
    """Write groups of any sizes into a new directory. Consecutive groups with the same columns share a folder."""
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
    """Save the state of the global generators of torch, numpy and Python, which a verifier may use."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    save_file(tensors, directory / "random.safetensors")
    algorithm, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one
    state = {"numpy": [algorithm, np.asarray(keys).tolist(), position, has_gauss, gauss], "python": random.getstate()}
    (directory / "random.json").write_text(json.dumps(state))


def load_random_state(directory: Path) -> None:
    """Load the state of the global generators that :func:`save_random_state` wrote."""
    tensors = load_file(directory / "random.safetensors")
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available() and "cuda.0" in tensors:
        torch.cuda.set_rng_state_all([tensors[f"cuda.{i}"] for i in range(len(tensors) - 1)])
    state: dict[str, Any] = json.loads((directory / "random.json").read_text())
    algorithm, keys, *rest = state["numpy"]
    np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002 - the global one
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
