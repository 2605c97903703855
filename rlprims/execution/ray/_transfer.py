"""A transfer of weights, on the side of the training ranks."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

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
    """Sends from CPU memory with :mod:`rlprims.execution.ray._wire`.

    The connections are kept while the engines stay the same and nothing fails.
    """

    def __init__(self, rank: int, host: str, timeout: float) -> None:
        self.rank, self.host, self.timeout = rank, host, timeout
        self.sender: Sender | None = None
        self.connected: list[Any] = []

    def send(self, source: Source, client: EngineClient) -> Sums:
        if self.rank != 0:
            for _ in source:
                pass
            return {}
        sums, failure = Sums(), None
        with ThreadPoolExecutor(1) as side:
            updating: Future[None] | None = None
            for infos, tensors in source:
                if failure is not None:
                    continue  # keep gathering, because the other ranks take part in each collective
                try:
                    if updating is None:
                        sender = self._connected(client, side)
                        client.start_weight_update()
                        # This call ends when all engines have all tensors.
                        updating = side.submit(client.update_weights, {"parts": source.parts})
                    sums |= sender.send(infos, tensors)
                except Exception as error:
                    failure = error
                    self.close()  # engines that wait for tensors get an error, so the pending call ends
                del tensors  # free this layer before the next one is gathered
            try:
                if failure is None and updating is not None:
                    sender.finish()
                    updating.result()
            except Exception as error:
                failure = error
                self.close()
        client.finish_weight_update()
        if client.failures:
            self.close()
        elif failure is not None:
            raise failure
        return sums

    def _connected(self, client: EngineClient, side: ThreadPoolExecutor) -> Sender:
        """Return a sender that is connected to the client's engines."""
        engines = list(client.engines.values())
        if self.sender is not None and engines == self.connected:
            self.sender.heed = client.heed
            return self.sender
        self.close()
        self.sender, self.connected = Sender(self.host, self.timeout, client.heed), engines
        host, port = self.sender.address
        where = {"host": host, "port": port, "rank_offset": 1, "size": client.size, "timeout": self.timeout}
        opening = side.submit(client.init_weight_transfer_engine, where)
        self.sender.connect(client.size - 1)
        opening.result()
        return self.sender

    def close(self) -> None:
        """Close the connections. The next transfer opens new ones."""
        if self.sender is not None:
            self.sender.close()
        self.sender, self.connected = None, []


def transfer_by(backend: str, rank: int, host: str, timeout: float) -> Transfer:
    """Return a backend by its name. Importing vLLM takes seconds and 165 MB, so only its backends do it."""
    if backend == "gloo":
        return Gloo(rank, host, timeout)
    from rlprims.execution.ray._vllm_transfer import Ipc, Nccl

    transfer: Transfer = Nccl(rank, host) if backend == "nccl" else Ipc(rank)
    return transfer
