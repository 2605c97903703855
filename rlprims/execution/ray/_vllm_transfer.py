"""vLLM's own transfers of weights between GPUs, on the side of a training rank; here they get tensors and a client.

NCCL sends to engines on other devices, CUDA IPC to an engine on the same device.
"""

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rlprims._event_loop import in_daemon
from rlprims.execution.ray._transfer import EngineClient, Source
from rlprims.execution.ray._wire import Sums, checksums

_BUFFER = 64 << 20
"""The least size in bytes of vLLM's packed buffers. A buffer must hold the largest tensor."""


class SnapshotSource(WeightSource):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Gives the tensors of a :class:`Source` to vLLM's trainer classes. On rank 0 ``sums`` has their checksums."""

    def __init__(self, source: Source, rank: int) -> None:
        self.source, self.rank = source, rank
        self.sums: Sums = {}

    def metadata(self) -> list[Any]:
        infos = [info for part in self.source.parts for info in part]
        return [ParamMeta(info.name, getattr(torch, info.dtype), tuple(info.shape)) for info in infos]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.sums = {}
        for infos, tensors in self.source:
            for info, tensor in zip(infos, tensors, strict=True):
                cast = tensor.detach().to(getattr(torch, info.dtype)).contiguous()
                if self.rank == 0:
                    self.sums |= checksums({info.name: cast})
                yield info.name, cast


class Nccl:
    """Sends packed tensors from rank 0 to engines on other devices, over one communicator while these stay the same."""

    def __init__(self, rank: int, host: str) -> None:
        self.rank, self.host = rank, host
        self.engine: Any = None
        self.connected: list[Any] = []

    def send(self, source: Source, client: EngineClient) -> Sums:
        reads = SnapshotSource(source, self.rank)
        client.unblock = self._unblock
        engines = list(client.engines.values())
        if self.engine is None or engines != self.connected:
            self.close()
            try:
                self.engine, self.connected = self._connected(reads, client), engines
            except Exception:
                if not client.failures:
                    raise
                for _ in source:  # keep gathering, because the other ranks take part in each collective
                    pass
                return {}
        self.engine.client, self.engine.source = client, reads
        self.engine.send_weights()
        if client.failures:
            self.close()
        return reads.sums

    def _connected(self, reads: SnapshotSource, client: EngineClient) -> Any:
        with reserved_port(self.host) as port:  # only rank 0 uses it
            info = NCCLTrainerInitInfo(
                rank=self.rank,
                master_address=self.host,
                master_port=port,
                world_size=client.size,
                packed=True,
                packed_buffer_size_bytes=max(_BUFFER, reads.source.largest),
            )
            # In a thread, because neither the store nor NCCL stops waiting for an engine that is lost meanwhile.
            make = partial(WeightTransferTrainerFactory.trainer_init, info, client=client, source=reads)
            made = in_daemon(make, Future[Any]())
            while not wait_for([made], timeout=0.1).done:
                client.heed()
            return made.result()

    def _unblock(self) -> None:
        """Abort the NCCL operations that wait for the engines. Another thread than the waiting one calls this."""
        group = self.engine and self.engine.model_update_group
        if group is not None and group.available and not group.disabled:
            group.disabled = True  # later broadcasts return at once
            group.nccl.ncclCommAbort(group.comm)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
        self.engine, self.connected = None, []


class Ipc:
    """Sends packed tensors from every rank to the engine on its device, which reads the rank's memory."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def send(self, source: Source, client: EngineClient) -> Sums:
        reads = SnapshotSource(source, self.rank)
        size = max(_BUFFER, source.largest)
        info = IPCTrainerInitInfo(rank=self.rank, packed=True, packed_buffer_size_bytes=size)
        WeightTransferTrainerFactory.trainer_init(info, client=client, source=reads).send_weights()
        torch.cuda.empty_cache()  # the engine uses the device next
        return reads.sums


@contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """A free port for vLLM, which no other process gets meanwhile: a socket is bound to it, and does not listen.

    Only a socket that asks for this port with SO_REUSEADDR gets it, as vLLM's does.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield holder.getsockname()[1]
