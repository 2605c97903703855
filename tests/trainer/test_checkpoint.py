"""After a death at any moment of a save there is a whole checkpoint; a damaged one is named and never loaded."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlprims.data_proto import DataProto
from rlprims.runs import checkpoint
from rlprims.runs.checkpoint import (
    Background,
    add_models,
    begin_checkpoint,
    damage_of,
    load_groups,
    load_random_state,
    newest_checkpoint,
    policy_of,
    save_groups,
)
from rlprims.runs.disk_errors import CannotWrite
from rlprims.runs.end_tokens import load_tokenizer
from tests.trainer.runs import save_checkpoint


def write(value: int) -> Callable[[Path], None]:
    def writer(directory: Path) -> None:
        (directory / "policy").mkdir()
        (directory / "policy" / "weights").write_text(str(value) * 100)
        (directory / "state.json").write_text(str(value))

    return writer


def value_of(path: Path) -> int:
    assert (path / "policy" / "weights").read_text() == (path / "state.json").read_text() * 100
    return int((path / "state.json").read_text())


def die_at(event: int, work: Callable[[], object]) -> int:
    """Work in a child that ends, without any clean-up, at its n-th file operation; the exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen = 0
    originals = {name: getattr(os, name) for name in ("open", "fsync", "rename", "mkdir", "rmdir", "unlink")}

    def counted(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal seen
            seen += 1
            if seen == event:
                os._exit(7)
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(os, name, counted(name))
    try:
        work()
    finally:
        os._exit(0)


def test_a_death_at_any_file_operation_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_checkpoint(base, 1, write(1), keep=1)
    outcomes = []
    for event in range(1, 100):
        directory = tmp_path / f"at-{event}"
        shutil.copytree(base, directory)
        code = die_at(event, partial(save_checkpoint, directory, 2, write(2), keep=1))
        newest = newest_checkpoint(directory, warn=pytest.fail)
        outcomes.append(value_of(newest))
        # and the next save succeeds over whatever was left lying
        assert value_of(save_checkpoint(directory, 3, write(3), keep=1)) == 3
        assert [path.name for path in directory.iterdir()] == ["step_000003"]
        if code == 0:
            break
    assert len(outcomes) > 15
    assert set(outcomes) == {1, 2}
    assert outcomes == sorted(outcomes), "once the new one is there it stays"


@pytest.mark.parametrize("how", ["cut", "flipped", "missing", "no manifest", "torn manifest", "other format", "escape"])
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, how: str) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, write(step), keep=2)
    newest = tmp_path / "step_000002"
    file, manifest = newest / "policy" / "weights", newest / "manifest.json"
    if how == "cut":
        file.write_text(file.read_text()[:-1])
    elif how == "flipped":
        file.write_text("3" + file.read_text()[1:])
    elif how == "missing":
        file.unlink()
    elif how == "no manifest":
        manifest.unlink()
    elif how == "torn manifest":
        manifest.write_text(manifest.read_text()[:40])
    elif how == "other format":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    else:
        content = json.loads(manifest.read_text())
        content["files"]["../../outside"] = "0"
        manifest.write_text(json.dumps(content))
        (tmp_path.parent / "outside").write_text("x")
    warnings: list[str] = []
    assert newest_checkpoint(tmp_path, warn=warnings.append).name == "step_000001"
    assert len(warnings) == 1
    assert "step_000002 is damaged" in warnings[0]
    shutil.rmtree(tmp_path / "step_000001")
    with pytest.raises(ValueError, match=r"all of \['step_000002'\] are damaged"):
        newest_checkpoint(tmp_path, warn=warnings.append)


def test_a_damaged_one_is_written_anew_and_takes_no_whole_ones_place(tmp_path: Path) -> None:
    """A resume goes on from step 2, past 3 and 4, which are damaged."""
    for step in (2, 3, 4):
        save_checkpoint(tmp_path, step, write(step), keep=3)
    for step in (3, 4):
        (tmp_path / f"step_{step:06d}" / "policy" / "weights").write_text("torn")
    assert value_of(save_checkpoint(tmp_path, 3, write(30), keep=1)) == 30
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]
    assert newest_checkpoint(tmp_path, warn=pytest.fail).name == "step_000003"
    # a whole one is as it was: the same step again has the same state
    assert value_of(save_checkpoint(tmp_path, 3, write(31), keep=1)) == 30


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is none yet"):
        newest_checkpoint(tmp_path, warn=pytest.fail)


def test_checkpoints_keep_only_the_newest(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_checkpoint(tmp_path, step, write(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000004", "step_000005"]
    assert all(damage_of(path) is None for path in tmp_path.iterdir())


def test_a_failed_save_leaves_the_old_one_and_raises(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, write(1), keep=1)

    def full(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 2, full, keep=1)
    assert value_of(newest_checkpoint(tmp_path, warn=pytest.fail)) == 1


class TestInTheBackground:
    def test_training_meets_the_error_at_its_next_call(self, tmp_path: Path) -> None:
        def full() -> None:
            raise OSError(28, "No space left on device")

        background, gate = Background(), Event()

        def begin(directory: Path) -> Callable[[], dict[str, str]]:
            write(1)(directory)
            return full_later(gate)

        finish = begin_checkpoint(tmp_path, 1, begin, keep=1)
        assert [path.name for path in tmp_path.iterdir()] == [".writing-1"]
        background.begin(finish)
        background.check()  # it has not failed yet
        gate.set()
        with pytest.raises(CannotWrite, match=r"cannot write .*/step_000001: .*No space left"):
            background.begin(pytest.fail)  # nothing begins before the one before it is complete
        assert not list(tmp_path.iterdir())
        background.begin(full)
        with pytest.raises(OSError, match="No space left"):
            background.wait()
        background.check()
        background.wait()

    def test_a_checkpoint_is_there_when_its_writers_have_finished(self, tmp_path: Path) -> None:
        save_checkpoint(tmp_path, 1, write(1), keep=1)
        background, gate = Background(), Event()

        def begin(directory: Path) -> Callable[[], dict[str, str]]:
            write(2)(directory)

            def finish() -> dict[str, str]:
                gate.wait()
                return {"state.json": hashlib.sha256(b"2").hexdigest()}

            return finish

        background.begin(begin_checkpoint(tmp_path, 2, begin, keep=1))
        assert value_of(newest_checkpoint(tmp_path, warn=pytest.fail)) == 1
        gate.set()
        background.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]
        assert value_of(newest_checkpoint(tmp_path, warn=pytest.fail)) == 2

    def test_what_a_rank_wrote_must_be_on_the_trainers_disk(self, tmp_path: Path) -> None:
        with pytest.raises(CannotWrite, match=r"policy_shards/1 is not here.*share the disk of run_dir"):
            save_checkpoint(tmp_path, 1, lambda directory: lambda: {"policy_shards/1": "0"}, keep=1)


def full_later(gate: Event) -> Callable[[], dict[str, str]]:
    def finish() -> dict[str, str]:
        gate.wait()
        raise OSError(28, "No space left on device")

    return finish


def in_shards(model: Path) -> Callable[[Path], None]:
    """The policy as one rank would write it."""

    def writer(directory: Path) -> None:
        shutil.copytree(model, directory / "policy_shards")

    return writer


@pytest.mark.slow
def test_a_death_while_models_are_added_leaves_the_checkpoint(model: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_checkpoint(base, 1, in_shards(model), keep=1)
    outcomes = []
    for event in range(1, 100):
        directory = tmp_path / f"at-{event}"
        shutil.copytree(base, directory)
        (found,) = directory.iterdir()
        code = die_at(event, partial(add_models, found))
        assert newest_checkpoint(directory, warn=pytest.fail) == found
        outcomes.append((found / "policy").exists())
        add_models(found)
        assert damage_of(found) is None
        ours, theirs = load_file(found / "policy" / "model.safetensors"), load_file(model / "model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        with policy_of(found) as policy:
            assert policy == found / "policy"
        assert not list(found.glob(".writing*"))
        if code == 0:
            break
    assert len(outcomes) > 10
    assert outcomes == sorted(outcomes)


def test_a_policy_in_shards_is_a_model_for_a_block(model: Path, tmp_path: Path) -> None:
    found = save_checkpoint(tmp_path, 1, in_shards(model), keep=1)
    with policy_of(found) as policy:
        assert (policy / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
        AutoModelForCausalLM.from_pretrained(policy)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    wanted = f"there is no such folder; .* rlprims export {tmp_path.parent} {found / 'policy'} --step 1 --model policy$"
    with pytest.raises(ValueError, match=wanted):
        load_tokenizer(str(found / "policy"), Console())
    with pytest.raises(ValueError, match=r"there is no such folder$"):
        load_tokenizer(str(found / "other"), Console())


def test_every_generator_continues(tmp_path: Path) -> None:
    checkpoint.save_random_state(tmp_path)
    drawn = (torch.rand(3), np.random.rand(3), random.random(), random.gauss(0, 1))  # noqa: NPY002 - the global one
    load_random_state(tmp_path)
    again = (torch.rand(3), np.random.rand(3), random.random(), random.gauss(0, 1))  # noqa: NPY002 - the global one
    assert torch.equal(drawn[0], again[0])
    assert (drawn[1] == again[1]).all()
    assert drawn[2:] == again[2:]


def test_groups_of_any_sizes_and_columns_come_back_as_they_were(tmp_path: Path) -> None:
    def group(size: int, **columns: torch.Tensor) -> DataProto:
        ids = np.array([[size, row] for row in range(size)], dtype=object)
        return DataProto.from_dict(tensors={"x": torch.rand(size), **columns}, non_tensors={"ids": ids})

    groups = [group(3), group(2), group(1, bonus=torch.ones(1)), group(4)]
    save_groups(groups, tmp_path / "groups")
    back = load_groups(tmp_path / "groups")
    assert [set(rows.batch.keys()) for rows in back] == [{"x"}, {"x"}, {"x", "bonus"}, {"x"}]
    for ours, theirs in zip(groups, back, strict=True):
        assert torch.equal(ours["x"], theirs["x"])
        assert ours["ids"].tolist() == theirs["ids"].tolist()
    save_groups([], tmp_path / "none")
    assert not (tmp_path / "none").exists()
