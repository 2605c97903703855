"""A model over ranks by FSDP2: sharded weights, gradients and optimizer; sharded checkpoints without pickle."""

import json
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlprims.execution._config import RayConfig
from rlprims.execution.hf import Ranks
from rlprims.execution.hf._adapters import check_base, is_adapted
from rlprims.execution.hf._models import adapter_of, save_model
from rlprims.execution.hf._train_state import TrainState

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def join(
    rank: int, size: int, address: tuple[str, int], listener: socket.socket | None, *, device: str, timeout: float
) -> None:
    """Meet the other ranks where rank 0's ``listener`` is; one that dies or hangs is noticed within the timeout."""
    backend = "nccl" if device == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    # A store that opens its own socket listens on every interface.
    mine = {"is_master": True, "master_listen_fd": listener.detach()} if listener is not None else {"is_master": False}
    store = dist.TCPStore(*address, world_size=size, timeout=limit, **mine)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


def ranks(config: RayConfig, size: int, device: str) -> Ranks:
    """How this process shares a model with the others that have joined."""
    mesh = init_device_mesh(device, (size,))
    mixed = getattr(torch, config.mixed_precision) if config.mixed_precision else None
    precision = MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=torch.float32 if mixed else None)
    offload = CPUOffloadPolicy() if config.cpu_offload and device != "cpu" else OffloadPolicy()

    def shard(module: nn.Module) -> nn.Module:
        blocks = [m for m in module.modules() if type(m).__name__ in _block_names(module)]
        if config.activation_checkpointing:
            kinds = tuple({type(block) for block in blocks})
            apply_activation_checkpointing(module, check_fn=lambda m: isinstance(m, kinds))
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
        return module

    def largest(number: int) -> int:
        numbers = torch.tensor([number], device=device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return int(numbers)

    return Ranks(size, shard, largest)


def _block_names(module: nn.Module) -> set[str]:
    return set(getattr(module, "_no_split_modules", None) or ())


def whole(tensor: Tensor) -> Tensor:
    """A tensor of all ranks on each of them, on the CPU."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().cpu()
    # After a forward it may be gathered already: what FSDP frees later must not be lent to an array.
    return tensor.detach().to("cpu", copy=True)


def save(train_state: TrainState, directory: Path, name: str, *, rank: int) -> None:
    """Each rank writes its shards; rank 0 the whole model besides, as Hugging Face reads it."""
    _write(_weights(train_state), directory / f"{name}_shards")
    if train_state.optimizer.state:  # else there is nothing yet, and asking for it would begin it
        _write(_slots(train_state), directory / f"{name}_optimizer_shards")
    full = _full(train_state)
    if rank == 0:
        save_model(train_state.module, directory / name, full)
        (directory / f"{name}_optimizer.json").write_text(json.dumps({"update": train_state.update}))
    dist.barrier()


def load(train_state: TrainState, directory: Path, name: str) -> None:
    """What :func:`save` wrote, on any number of ranks.

    Raises:
        ValueError: it is of another model.
    """
    weights = _weights(train_state)
    _read(weights, directory / f"{name}_shards")
    set_model_state_dict(
        train_state.module, weights, options=StateDictOptions(strict=False)
    )  # a tied weight is there once
    if is_adapted(train_state.module) and (full := _full(train_state)):
        check_base(train_state.module, adapter_of(directory / name), full)
    train_state.update = json.loads((directory / f"{name}_optimizer.json").read_text())["update"]
    slots_of_all = directory / f"{name}_optimizer_shards"
    if not slots_of_all.exists():
        train_state.optimizer.state.clear()
        return
    slots = _slots(train_state)
    _read(slots, slots_of_all)
    for key in (k for k in slots if k.endswith(".step")):
        slots[key] = slots[key].reshape(())
    everything: dict[str, Any] = {
        **get_optimizer_state_dict(train_state.module, train_state.optimizer, options=_FLAT),
        **slots,
    }
    set_optimizer_state_dict(train_state.module, train_state.optimizer, everything, options=_FLAT)


def _write(tensors: dict[str, Any], directory: Path) -> None:
    save_shards(tensors, storage_writer=HuggingFaceStorageWriter(str(directory), save_distributed=True))


def _read(tensors: dict[str, Any], directory: Path) -> None:
    """Into tensors that are there already."""
    reader = HuggingFaceStorageReader(str(directory))
    stored = set(reader.read_metadata().state_dict_metadata)
    lost, unknown = sorted(set(tensors) - stored), sorted(stored - set(tensors))
    if lost or unknown:
        raise ValueError(f"{directory} does not fit the model: lacks {lost[:3]}, has unknown {unknown[:3]}")
    load_shards(tensors, storage_reader=reader)


def _full(train_state: TrainState) -> dict[str, Any]:
    """The whole model on rank 0; nothing on the others."""
    state: dict[str, Any] = get_model_state_dict(
        train_state.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return state


def _weights(train_state: TrainState) -> dict[str, Any]:
    """The shards of what is trained on this rank; of tied weights the first name."""
    once: dict[int, str] = {}
    state: dict[str, Any] = get_model_state_dict(
        train_state.module, options=StateDictOptions(ignore_frozen_params=True)
    )
    for name, x in state.items():
        local = x.to_local() if isinstance(x, DTensor) else x
        once.setdefault(local.data_ptr() if local.numel() else -len(once) - 1, name)
    return {name: state[name] for name in once.values()}


def _slots(train_state: TrainState) -> dict[str, Tensor]:
    """The optimizer's tensors by name: its state begins to exist where there was none."""
    state: Any = get_optimizer_state_dict(train_state.module, train_state.optimizer, options=_FLAT)
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    return {name: x.reshape(1) if x.dim() == 0 else x for name, x in tensors.items()}
