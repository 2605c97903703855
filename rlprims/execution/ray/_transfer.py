"""A transfer of weights, on the side of the training ranks."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Protocol

from rlprims.execution.ray._client import EngineClient
from rlprims.execution.ray._source import Source
from rlprims.execution.ray._wire import Sender, Sums


class Transfer(Protocol):
    """The interface of a backend. All ranks call it at the same time, because gathering is a collective."""

    def send(self, source: Source, client: EngineClient) -> Sums:
        """Send all tensors of the source to the client's engines; returns the checksums of the sent tensors.

        If an engine fails, its error is in ``client.failures`` and is not raised.
        """
        ...


class Gloo:
    """Sends from CPU memory with :mod:`rlprims.execution.ray._wire`. Each transfer opens new connections."""

    def __init__(self, rank: int, host: str, timeout: float) -> None:
        self.rank, self.host, self.timeout = rank, host, timeout

    def send(self, source: Source, client: EngineClient) -> Sums:
        if self.rank != 0:
            for _ in source:
                pass
            return {}
        sender, sums, failure = Sender(self.host, self.timeout, client.heed), Sums(), None
        # On an error the sender must close before the thread pool: engines that wait for it get an error, their calls
        # return, and the thread can end.
        with ThreadPoolExecutor(1) as side, closing(sender):
            updating: Future[None] | None = None
            for infos, tensors in source:
                if failure is not None:
                    continue  # keep gathering, because the other ranks take part in each collective
                try:
                    updating = updating or self._connected(source, client, sender, side)
                    sums |= sender.send(infos, tensors)
                except Exception as error:
                    failure = error
                del tensors  # free this layer before the next one is gathered
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
        """Connect all engines and let them receive; returns the pending call, which ends when all have all tensors."""
        host, port = sender.address
        where = {"host": host, "port": port, "rank_offset": 1, "size": client.size, "timeout": self.timeout}
        opening = side.submit(client.init_weight_transfer_engine, where)
        sender.connect(client.size - 1)
        opening.result()
        client.start_weight_update()
        return side.submit(client.update_weights, {"parts": source.parts})


def transfer_by(backend: str, rank: int, host: str, timeout: float) -> Transfer:
    """Return a backend by its name. Importing vLLM takes seconds and 165 MB, so only its backends do it."""
    if backend == "gloo":
        return Gloo(rank, host, timeout)
    from rlprims.execution.ray._vllm_transfer import Ipc, Nccl

    transfer: Transfer = Nccl(rank, host) if backend == "nccl" else Ipc(rank)
    return transfer
