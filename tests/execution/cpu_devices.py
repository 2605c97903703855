"""vLLM's transfers between GPUs, on a CPU: in a process, what needs a device is replaced, and nothing else.

vLLM's classes run as they are, with their packing, their checks and their order of calls. A communicator of NCCL is a
process group of gloo; a handle of CUDA's IPC is the name of a file that two processes map; a stream does nothing.
"""

import os
import threading
import types
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing.reductions as reductions
from vllm.distributed.weight_transfer import ipc_engine, nccl_common, nccl_engine, packed_tensor

dist: Any = torch.distributed


class Communicator:
    """As vLLM's ``PyNcclCommunicator``."""

    available, disabled = True, False

    def __init__(self, host: str, port: int, rank: int, size: int) -> None:
        limit = timedelta(seconds=300)  # vLLM's
        store = dist.TCPStore(host, port, size, rank == 0, limit)
        self.comm, self.nccl = dist.ProcessGroupGloo(dist.PrefixStore("nccl", store), rank, size, limit), self

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if not self.disabled:
            try:
                self.comm.broadcast(tensor, src).wait()
            except RuntimeError:  # NCCL would wait until it is aborted
                threading.Event().wait(0.2)
                while not self.disabled:
                    threading.Event().wait(0.05)

    def ncclCommAbort(self, comm: Any) -> None:
        self.comm = None

    def destroy(self) -> None:
        self.comm = None


class Stream:
    cuda_stream = 0

    def synchronize(self) -> None: ...


class Torch:
    """The module torch for a file that asks for a CUDA device."""

    def __init__(self, device: str) -> None:
        self.cuda = types.SimpleNamespace(
            get_device_properties=lambda index: types.SimpleNamespace(uuid=device),
            current_stream=Stream,
            stream=lambda stream: nullcontext(),
            synchronize=lambda: None,
            ipc_collect=lambda: None,
            is_available=lambda: False,
            Stream=Stream,
        )
        self.accelerator = types.SimpleNamespace(current_device_index=lambda: 0, synchronize=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, device: Any = None, **options: Any) -> torch.Tensor:
        if device != "cuda":
            return torch.empty(*size, **options)
        file = os.memfd_create("ipc")  # ends with the process
        os.ftruncate(file, size[0])
        name = f"/proc/{os.getpid()}/fd/{file}"
        tensor = torch.from_file(name, shared=True, size=size[0], dtype=torch.uint8)
        FILES[tensor.data_ptr()] = name, size[0]
        return tensor


FILES: dict[int, tuple[str, int]] = {}


def handle(tensor: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
    """In the form of ``reduce_tensor``, where the seventh is the device's number."""
    return None, (*FILES[tensor.data_ptr()], None, None, None, None, 0)


def opened(name: str, size: int, *_: Any) -> torch.Tensor:
    return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)


def replace(device: str, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on this process has a GPU of this name, as far as these files of vLLM are concerned."""
    for module in (ipc_engine, nccl_common, nccl_engine, packed_tensor):
        put(module, "torch", Torch(device))
    put(packed_tensor, "_get_streams", lambda index, count: tuple(Stream() for _ in range(count)))
    put(packed_tensor, "reduce_tensor", handle)
    put(
        nccl_common,
        "stateless_init_process_group",
        lambda host, port, rank, size, device: Communicator(host, port, rank, size),
    )
    put(reductions, "rebuild_cuda_tensor", opened)  # the importer of a buffer imports it when it needs it
