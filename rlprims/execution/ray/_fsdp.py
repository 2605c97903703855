"""A model over ranks by FSDP2: sharded weights, gradients and optimizer."""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from rlprims.execution._config import ModelConfig, RayConfig
from rlprims.execution.hf import Ranks
from rlprims.execution.hf._models import (
    empty_causal_lm,
    load_causal_lm,
    usable_device,
)
from rlprims.execution.ray._tensor_parallel import divide

_CPU = torch.device("cpu")


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


def time_all_reduce(size: int, device: torch.device) -> tuple[str, float, bool]:
    """The backend, the seconds of a sum of so many bytes over all ranks, and whether the sum is right."""
    ones = torch.ones(size // 4, device=device)
    dist.all_reduce(ones)  # the first call connects the ranks
    seconds = []
    for _ in range(3):
        ones.fill_(1.0)
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(ones)
        right = bool((ones == dist.get_world_size()).all())  # waits for the device
        seconds.append(time.perf_counter() - begun)
    return dist.get_backend(), min(seconds), right


def ranks(config: RayConfig, size: int, device: str, dtype: str | None = None) -> Ranks:
    """How this process shares a model with those that have joined; None computes in the dtype of the weights."""
    mesh, tensor = _meshes(config, size, device)
    name = config.mixed_precision or dtype
    computes_in = getattr(torch, name) if name else None
    precision = MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=torch.float32 if name else None)
    offload = CPUOffloadPolicy() if config.cpu_offload and device != "cpu" else OffloadPolicy()

    def shard(module: nn.Module) -> nn.Module:
        if tensor is not None:
            divide(module, tensor)
        blocks = [m for m in module.modules() if type(m).__name__ in _block_names(module)]
        if config.activation_checkpointing:
            kinds = tuple({type(block) for block in blocks})
            apply_activation_checkpointing(module, check_fn=lambda m: isinstance(m, kinds))
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
        module.within = _call  # type: ignore[assignment]
        register_fsdp_forward_method(module, "within")
        return module

    def load(path: str, model: ModelConfig) -> nn.Module:
        empty = empty_causal_lm(path, model)
        if empty is None:
            return shard(load_causal_lm(path, model))
        where = torch.device("cpu") if config.cpu_offload else usable_device(model)
        return _filled(shard(empty), Path(path), where)

    def largest(number: int) -> int:
        numbers = torch.tensor([number], device=device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return int(numbers)

    def within(module: nn.Module, compute: Callable[[], Any]) -> Any:
        # The head is whole inside the forward pass of the module alone: the base of the model must run there, too.
        return module.within(compute)  # type: ignore[operator]

    def reduce_next(module: Any, last: bool) -> None:
        module.set_requires_gradient_sync(last or config.reduce_gradients == "every_micro_batch")
        module.set_is_last_backward(last)

    return Ranks(size // config.training_tensor_parallel, shard, load, largest, within, reduce_next)


def _meshes(config: RayConfig, size: int, device: str) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The ranks over which FSDP2 shards, with several copies in its first dimension; and those that divide layers."""
    tensor, sharers = config.training_tensor_parallel, config.shard_over or size
    sizes = {"copies": size // sharers, "shards": sharers // tensor, "tensor": tensor}
    sizes = {name: count for name, count in sizes.items() if count > 1 or name == "shards"}
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if tensor == 1:
        return mesh, None
    return mesh[tuple(name for name in sizes if name != "tensor")], mesh["tensor"]


def _filled(module: nn.Module, folder: Path, device: torch.device) -> nn.Module:
    """A module without data gets its shards, from the files of a Hugging Face model: a rank reads its own parts."""
    names: dict[int, str] = {}
    filled: dict[str, nn.Parameter] = {}
    for name, empty in module.state_dict(keep_vars=True).items():
        first = names.setdefault(id(empty), name)  # tied parameters stay one
        filled[name] = (
            filled[first]
            if first != name
            else nn.Parameter(torch.empty_like(empty, device=device), requires_grad=empty.requires_grad)
        )
    with torch.no_grad():
        stored: Any = {name: filled[name].detach() for name in names.values()}
        load_shards(stored, storage_reader=HuggingFaceStorageReader(str(folder)))
    module.load_state_dict(filled, assign=True)
    return module


def _call(compute: Callable[[], Any]) -> Any:
    return compute()


def _block_names(module: nn.Module) -> set[str]:
    return set(getattr(module, "_no_split_modules", None) or ())


def whole(tensor: Tensor) -> Tensor:
    """A tensor of all ranks on each of them, on the CPU."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().cpu()
    # After a forward it may be gathered already: what FSDP frees later must not be lent to an array.
    return tensor.detach().to("cpu", copy=True)


class Shard(NamedTuple):
    """A rank's part of a parameter as it was, on the CPU; of one that is not sharded the whole."""

    local: Tensor
    of: DTensor | None  # its layout, without its data
    device: torch.device

    def whole(self, device: torch.device = _CPU) -> Tensor:
        """Of all ranks, on this device of each of them: every rank must ask."""
        if self.of is None:
            return self.local.to(device)
        layout = self.of
        sharded = DTensor.from_local(
            self.local.to(self.device),
            layout.device_mesh,
            layout.placements,
            run_check=False,
            shape=layout.shape,
            stride=layout.stride(),
        )
        return sharded.full_tensor().to(device)


def shard_of(parameter: Tensor, *, copy: bool = True) -> Shard:
    """A parameter as it is; without ``copy`` of one that nobody changes."""
    if not isinstance(parameter, DTensor):
        return Shard(parameter.detach().to("cpu", copy=copy), None, parameter.device)
    local = parameter.to_local().detach()
    layout = DTensor.from_local(
        torch.empty_like(local, device="meta"),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return Shard(local.to("cpu", copy=copy), layout, local.device)
