"""The ranks' half of a transfer of weights."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Protocol

from rlprims.execution.ray._client import EngineClient
from rlprims.execution.ray._source import Source
from rlprims.execution.ray._wire import Sender, Sums


class Transfer(Protocol):
    """A backend. Every rank has one, and calls it at the same time; rank 0 sends."""

    def send(self, source: Source, client: EngineClient) -> Sums:
        """Send everything by the client's four calls; the checksums of what was sent.

        An engine's failure is the client's to report.
        """
        ...


class Gloo:
    """Through the memory of the CPU, by :mod:`rlprims.execution.ray._wire`; each time over a new connection."""

    def __init__(self, rank: int, host: str, timeout: float) -> None:
        self.rank, self.host, self.timeout = rank, host, timeout

    def send(self, source: Source, client: EngineClient) -> Sums:
        if self.rank != 0:
            for _ in source:
                pass
            return {}
        sender, sums, failure = Sender(self.host, self.timeout, client.heed), Sums(), None
        # The sender is closed first: engines that wait for it get an error, and the thread beside this one ends.
        with ThreadPoolExecutor(1) as side, closing(sender):
            updating: Future[None] | None = None
            for infos, tensors in source:
                if failure is not None:
                    continue  # the other ranks wait for this one to gather
                try:
                    updating = updating or self._connected(source, client, sender, side)
                    sums |= sender.send(infos, tensors)
                except Exception as error:
                    failure = error
                del tensors  # before the next ones are gathered
            try:
                if failure is None and updating is not None:
                    sender.finish()
                    updating.result()
            except Exception as error:
                failure = error
        client.finish_weight_update()
        if failure is not None and not client.failures:
            raise failure
        return sums

    def _connected(
        self, source: Source, client: EngineClient, sender: Sender, side: ThreadPoolExecutor
    ) -> Future[None]:
        """Every engine receives now; the call ends when all have everything."""
        host, port = sender.address
        where = {"host": host, "port": port, "rank_offset": 1, "size": client.size, "timeout": self.timeout}
        opening = side.submit(client.init_weight_transfer_engine, where)
        sender.connect(client.size - 1)
        opening.result()
        client.start_weight_update()
        return side.submit(client.update_weights, {"parts": source.parts})


def transfer_by(backend: str, rank: int, host: str, timeout: float) -> Transfer:
    """A backend by its name; vLLM's are imported only here, as that takes seconds and 165 MB."""
    if backend == "gloo":
        return Gloo(rank, host, timeout)
    from rlprims.execution.ray._vllm_transfer import Ipc, Nccl

    transfer: Transfer = Nccl(rank, host) if backend == "nccl" else Ipc(rank)
    return transfer
