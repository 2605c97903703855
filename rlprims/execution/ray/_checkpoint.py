"""Checkpoints of sharded models: each rank writes its shards as safetensors while training continues.

Each rank copies its shards to the CPU. One thread writes the copies with torch.distributed.checkpoint, and frees each.
torch's ``async_save`` would need a thread and a process group for each state dict, of weights and of the optimizer.
"""

import copy
import itertools
import json
import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlprims._files import sha256
from rlprims.execution.hf._adapters import check_base, frozen, is_adapted, sum_of_bits, trained
from rlprims.execution.hf._models import adapter_of, save_adapter_of, shards_of
from rlprims.execution.hf._train_state import TrainState
from rlprims.execution.hf._vision import copy_processor, tower
from rlprims.execution.ray._fsdp import whole

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FILE_BYTES = 1 << 28
"""The approximate size of a file. A larger tensor has a file of its own."""
_ON_CPU = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


class _Copy(NamedTuple):
    """A copy of a model's state at one moment, to be written to files."""

    shards: dict[str, dict[str, Any]]  # state dicts on the CPU, by folder; each is removed when its writing begins
    module: Any
    adapter: dict[str, Tensor]  # the whole trained tensors, if the model has adapters
    update: int


class Saver:
    """Writes the checkpoints of one rank, one at a time. All ranks must create it, and call :meth:`begin`, together."""

    def __init__(self, *, timeout: float) -> None:
        self.rank = dist.get_rank()
        # The thread's own group, whose collectives cannot mix with training's; gloo, because the copies are on the CPU.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=partial(torch.set_num_threads, 1))
        self._writing: Future[dict[str, str]] | None = None
        self._checksums: dict[str, str] = {}

    def begin(self, states: Mapping[str, TrainState], directory: Path) -> None:
        """Copy the current state of the models, and start the thread that writes it into a directory."""
        if self._writing is not None:
            wait([self._writing])
        copies = {name: self._copy(state, name) for name, state in states.items()}
        self._writing = self._thread.submit(self._write, copies, directory)

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def result(self) -> dict[str, str]:
        """Wait until the last save of this rank is written; returns the SHA-256 of its files, by their paths."""
        return {} if self._writing is None else self._writing.result()

    def _copy(self, state: TrainState, name: str) -> _Copy:
        module: Any = state.module
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass the parameters of the root module may still be gathered
        tensors = {shards_of(Path(name)).name: _weights(module)}
        if state.optimizer.state:  # before the first step there is no state, and reading it would create it
            tensors[f"{name}_optimizer_shards"] = _slots(state)
        stager = DefaultStager(_ON_CPU)
        copied: Any = stager.stage(tensors)
        stager.close()
        adapter = {}
        if is_adapted(module):
            adapter = {name: whole(parameter) for name, parameter in trained(module).items()}
            if name not in self._checksums:  # frozen weights never change, so one checksum is enough
                self._checksums[name] = checksum(module, self._group)
        return _Copy(copied, module, adapter, state.update)

    def _write(self, copies: dict[str, _Copy], directory: Path) -> dict[str, str]:
        try:
            return self._write_all(copies, directory)
        except CheckpointException as error:
            failed, (cause, _) = next(iter(error.failures.items()))
            if not isinstance(cause, OSError | SafetensorError):
                raise
            raise OSError(f"{directory}: rank {failed}: {' '.join(str(cause).split())}") from error
        except (OSError, SafetensorError) as error:
            raise OSError(f"{directory}: {' '.join(str(error).split())}") from error

    def _write_all(self, copies: dict[str, _Copy], directory: Path) -> dict[str, str]:
        mine: list[Path] = []
        for copied in copies.values():
            for folder in list(copied.shards):
                tensors = copied.shards.pop(folder)
                writer = HuggingFaceStorageWriter(str(directory / folder), _files(tensors), save_distributed=True)
                save_shards(tensors, storage_writer=writer, process_group=self._group)
                mine += (directory / folder).glob(f"shard-{self.rank + 1:05d}-*.safetensors")
        if self.rank == 0:  # after the collectives, so no other rank waits for these files
            for name, copied in copies.items():
                self._describe(copied, directory, name)
        return {str(path.relative_to(directory)): sha256(path) for path in mine}

    def _describe(self, copied: _Copy, directory: Path, name: str) -> None:
        """Write the files beside the shards: the config of the model, its adapter, and the number of updates."""
        module, shards = copied.module, shards_of(directory / name)
        config = copy.deepcopy(module.config)
        config.architectures = [type(module).__name__.removeprefix("FSDP")]
        config.save_pretrained(shards)
        if module.can_generate():
            module.generation_config.save_pretrained(shards)
        if tower(module):
            copy_processor(module.config.name_or_path, shards)
        if copied.adapter:
            save_adapter_of(module, directory / name, copied.adapter, base_checksum=self._checksums[name])
        (directory / f"{name}_optimizer.json").write_text(json.dumps({"update": copied.update}))


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Assign each tensor to a small file, numbered from 1: safetensors needs memory for two copies of one."""
    begun = itertools.accumulate((x.numel() * x.element_size() for x in tensors.values()), initial=0)
    whole_file = FILE_BYTES * dist.get_world_size()
    return {name: 1 + begin // whole_file for name, begin in zip(tensors, begun, strict=False)}


def load(train_state: TrainState, directory: Path, name: str) -> None:
    """Read a checkpoint that a :class:`Saver` wrote, on any number of ranks; a ValueError if it does not fit."""
    weights = _weights(train_state.module)
    _read(weights, shards_of(directory / name))
    of_tied = StateDictOptions(strict=False)  # of tied weights only the first name is stored
    set_model_state_dict(train_state.module, weights, options=of_tied)
    if is_adapted(train_state.module):
        check_base(train_state.module, adapter_of(directory / name), checksum(train_state.module))
    train_state.update = json.loads((directory / f"{name}_optimizer.json").read_text())["update"]
    slots_of_all = directory / f"{name}_optimizer_shards"
    if not slots_of_all.exists():
        train_state.optimizer.state.clear()
        return
    slots = _slots(train_state)
    _read(slots, slots_of_all)
    for key in (k for k in slots if k.endswith(".step")):
        slots[key] = slots[key].reshape(())
    everything: Any = get_optimizer_state_dict(train_state.module, train_state.optimizer, options=_FLAT)
    set_optimizer_state_dict(train_state.module, train_state.optimizer, everything | slots, options=_FLAT)


def _read(tensors: dict[str, Any], directory: Path) -> None:
    """Read a folder of shards into existing tensors; their names must be the same."""
    reader = HuggingFaceStorageReader(str(directory))
    stored = set(reader.read_metadata().state_dict_metadata)
    lost, unknown = sorted(set(tensors) - stored), sorted(stored - set(tensors))
    if lost or unknown:
        raise ValueError(f"{directory} does not fit the model: lacks {lost[:3]}, has unknown {unknown[:3]}")
    load_shards(tensors, storage_reader=reader)


def checksum(module: Any, group: dist.ProcessGroup | None = None) -> str:
    """Compute :func:`rlprims.execution.hf._adapters.checksum` of a sharded module, from the sums of all shards."""
    mine: dict[int, int] = {}  # sums of bits, by the number of ranks that hold the same shard
    for parameter in frozen(module):
        copies, local = dist.get_world_size(), parameter.detach()
        if isinstance(parameter, DTensor):
            sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
            copies = math.prod(size for size, placement in sizes if placement.is_replicate())
            local = parameter.to_local()
        mine[copies] = mine.get(copies, 0) + sum_of_bits(local)
    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=group)
    return str(sum(sum(each[copies] for each in found) // copies for copies in mine))


def _weights(module: Any) -> dict[str, Any]:
    """This rank's shards of the trained weights and the part that reads images. Tied ones have their first name."""
    once: dict[int, str] = {}
    of_trained = StateDictOptions(ignore_frozen_params=is_adapted(module) or not tower(module))
    state: dict[str, Any] = get_model_state_dict(module, options=of_trained)
    for name, x in state.items():
        local = x.to_local() if isinstance(x, DTensor) else x
        once.setdefault(local.data_ptr() if local.numel() else -len(once) - 1, name)
    return {name: state[name] for name in once.values()}


def _slots(train_state: TrainState) -> dict[str, Tensor]:
    """The optimizer's tensors, by name. If the optimizer has no state yet, this creates it."""
    state: Any = get_optimizer_state_dict(train_state.module, train_state.optimizer, options=_FLAT)
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    return {name: x.reshape(1) if x.dim() == 0 else x for name, x in tensors.items()}
