"""Shard a model over ranks with FSDP2: its weights, gradients and optimizer."""

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

from rlprims.execution import ModelConfig, RayConfig
from rlprims.execution.hf import Ranks
from rlprims.execution.hf._models import empty_causal_lm, load_causal_lm, usable_device
from rlprims.execution.hf._vision import give_gradients, tower
from rlprims.execution.ray._tensor_parallel import divide

_CPU = torch.device("cpu")


def join(
    rank: int, size: int, address: tuple[str, int], listener: socket.socket | None, *, device: str, timeout: float
) -> None:
    """Create the process group of all ranks; rank 0 passes the ``listener`` of the store's address."""
    # With ray.cpu_offload the ranks of GPUs also exchange tensors that are on the CPU.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    # The store gets a socket, because the one that it would open itself would listen on every interface.
    mine = {"is_master": True, "master_listen_fd": listener.detach()} if listener is not None else {"is_master": False}
    store = dist.TCPStore(*address, world_size=size, timeout=limit, **mine)  # type: ignore[attr-defined]
    own = torch.device("cuda:0") if device == "cuda" else None  # NCCL need not guess it at the first collective
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=own)


def time_all_reduce(size: int, device: torch.device) -> tuple[str, float, bool]:
    """Time an all-reduce of ``size`` bytes: the backend, the seconds, and whether the sum is right."""
    ones = torch.ones(size // 4, device=device)
    dist.all_reduce(ones)  # the first collective also opens the connections
    seconds = []
    for _ in range(3):
        ones.fill_(1.0)
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(ones)
        right = bool((ones == dist.get_world_size()).all())  # this read waits until the device is done
        seconds.append(time.perf_counter() - begun)
    return "nccl" if device.type == "cuda" else "gloo", min(seconds), right


def ranks(config: RayConfig, size: int, device: str, dtype: str | None = None) -> Ranks:
    """Return the functions by which this process shards a model with the other ranks.

    A module computes in ``ray.mixed_precision``, else in ``dtype``, else in the dtype of its weights.
    """
    mesh, tensor = _meshes(config, size, device)
    name = config.mixed_precision or dtype
    computes_in = getattr(torch, name) if name else None
    precision = MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=torch.float32 if name else None)
    offload = CPUOffloadPolicy() if config.cpu_offload and device != "cpu" else OffloadPolicy()

    def shard(module: nn.Module) -> nn.Module:
        if tensor is not None:
            divide(module, tensor)
        names = set(getattr(module, "_no_split_modules", None) or ())
        # The part that reads images runs on ranks with images alone: each has it whole if it is frozen and computes in
        # its own dtype, else gathers it with the root.
        seeing = {*tower(module).values()}
        whole = {x for x in seeing if not x.requires_grad and computes_in in (None, x.dtype)}
        if any(x.requires_grad for x in seeing):
            give_gradients(module)
        blocks = [m for m in module.modules() if type(m).__name__ in names and seeing.isdisjoint(m.parameters())]
        if config.activation_checkpointing:
            kinds = tuple({type(block) for block in blocks})
            apply_activation_checkpointing(module, check_fn=lambda m: isinstance(m, kinds))
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision, offload_policy=offload)
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload, ignored_params=whole)
        module.within = lambda compute: compute()  # type: ignore[assignment]
        register_fsdp_forward_method(module, "within")
        return module

    def load(path: str, model: ModelConfig) -> nn.Module:
        empty = empty_causal_lm(path, model)
        if empty is None:
            return shard(load_causal_lm(path, model))
        where = _CPU if config.cpu_offload else usable_device(model)
        return _filled(shard(empty), Path(path), where)

    def largest(number: int) -> int:
        numbers = torch.tensor([number], device=device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return int(numbers)

    def within(module: nn.Module, compute: Callable[[], Any]) -> Any:
        # FSDP gathers the head only during the forward pass of the root module, so the computation must run inside it.
        return module.within(compute)  # type: ignore[operator]

    def reduce_next(module: Any, last: bool) -> None:
        module.set_requires_gradient_sync(last or config.reduce_gradients == "every_micro_batch")
        module.set_is_last_backward(last)

    def total(x: Tensor) -> Tensor:
        dist.all_reduce(x := x.clone())
        return x // config.training_tensor_parallel

    return Ranks(size // config.training_tensor_parallel, shard, load, largest, within, reduce_next, total)


def _meshes(config: RayConfig, size: int, device: str) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh of FSDP2, whose first dimension may number copies of the weights; and of divided layers, or None."""
    tensor, sharers = config.training_tensor_parallel, config.shard_over or size
    sizes = {"copies": size // sharers, "shards": sharers // tensor, "tensor": tensor}
    sizes = {name: count for name, count in sizes.items() if count > 1 or name == "shards"}
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if tensor == 1:
        return mesh, None
    return mesh[tuple(name for name in sizes if name != "tensor")], mesh["tensor"]


def _filled(module: nn.Module, folder: Path, device: torch.device) -> nn.Module:
    """Fill a module without data from the files of a Hugging Face model. Each rank reads only its own parts."""
    names: dict[int, str] = {}
    filled: dict[str, nn.Parameter] = {}
    for name, empty in module.state_dict(keep_vars=True).items():
        first = names.setdefault(id(empty), name)  # tied parameters stay tied
        if first == name:
            x = torch.empty_like(empty, device=device)
            filled[name] = nn.Parameter(x, requires_grad=empty.requires_grad)
        else:
            filled[name] = filled[first]
    with torch.no_grad():
        stored: Any = {name: filled[name].detach() for name in names.values()}
        load_shards(stored, storage_reader=HuggingFaceStorageReader(str(folder)))
    module.load_state_dict(filled, assign=True)
    return module


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; returns the whole tensor on the CPU of every rank."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().cpu()
    # After a forward pass FSDP may hold the gathered parameter and free its memory later, so this must be a copy.
    return tensor.detach().to("cpu", copy=True)


class Shard(NamedTuple):
    """A rank's part of a parameter on the CPU. If the parameter is not sharded, this is the whole parameter."""

    local: Tensor
    of: DTensor | None  # the layout: a DTensor without data; None if the parameter is not sharded
    device: torch.device

    def whole(self, device: torch.device = _CPU, dtype: torch.dtype | None = None) -> Tensor:
        """Gather the shards of all ranks on ``device``, cast first to ``dtype``. Every rank must call it."""
        if self.of is None:
            return self.local.to(device=device, dtype=dtype)
        return _sharded_like(self.of, self.local.to(device=self.device, dtype=dtype)).full_tensor().to(device)


def _sharded_like(x: DTensor, local: Tensor) -> DTensor:
    """A DTensor with the layout of ``x`` and another local tensor."""
    shape, stride = x.shape, x.stride()
    return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride)


def shard_of(parameter: Tensor, *, copy: bool = True) -> Shard:
    """Return this rank's shard of a parameter. ``copy=False`` may share memory: use it for frozen parameters."""
    if not isinstance(parameter, DTensor):
        return Shard(parameter.detach().to("cpu", copy=copy), None, parameter.device)
    local = parameter.to_local().detach()
    layout = _sharded_like(parameter, torch.empty_like(local, device="meta"))
    return Shard(local.to("cpu", copy=copy), layout, local.device)
