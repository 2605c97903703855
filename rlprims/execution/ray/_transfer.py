"""A transfer of weights, on the side of the training ranks: the tensors, the backends, and the calls of engines."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from rlprims.execution.hf._adapters import merged
from rlprims.execution.ray._calls import WorkerError, WorkerLost, fetch, settled
from rlprims.execution.ray._fsdp import Shard
from rlprims.execution.ray._wire import Info, Sender, Sums, layers

Failures = dict[int, WorkerError | WorkerLost]
"""The reason why a worker did not receive the weights, by the rank of the worker."""


class BrokenWith(WorkerLost):
    """An engine that cannot continue, because another engine was lost in the same NCCL transfer."""


class EngineClient:
    """Calls all engines at once for rank 0, with the four methods of vLLM's ``VLLMWeightSyncClient``.

    These store errors in :attr:`failures` and do not raise them, because the other ranks wait for rank 0 in a
    collective that gathers the next layer. After the first failure they make no further calls.

    Args:
        engines: the rollout workers, by their ranks.
        processes: the number of processes of each engine. The sender has rank 0 in the transfer, and the first process
            of an engine has the rank ``rank_offset``.
        unblock: called at the first failure, if the transfer has no timeout (NCCL): it ends all operations that wait
            for the engines, which all count as lost. None: the others get an error when the connection closes.
    """

    def __init__(
        self,
        engines: Mapping[int, Any],
        *,
        processes: int,
        version: int,
        timeout: float,
        unblock: Callable[[], None] | None = None,
    ) -> None:
        self.engines, self.processes, self.version, self.timeout = dict(engines), processes, version, timeout
        self.unblock = unblock
        self.failures: Failures = {}
        self.received: dict[int, Sums] = {}

    @property
    def size(self) -> int:
        """The number of processes in the transfer: the sender and all processes of the engines."""
        return 1 + len(self.engines) * self.processes

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        infos = dict.fromkeys(self.engines, init_info)
        if "rank_offset" in init_info:
            infos = {r: init_info | {"rank_offset": 1 + i * self.processes} for i, r in enumerate(self.engines)}
        self._ask("open", lambda rank: (infos[rank],))

    def start_weight_update(self) -> None:
        self._ask("start_update", lambda _: ())

    def update_weights(self, update_info: Any) -> None:
        shared = ray.put(update_info)
        self._ask("receive", lambda _: (shared,))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Tell the engines to use the new weights; if an engine has failed, tell the others to abandon the update."""
        if not self.failures:
            self.received = self._ask("finish_update", lambda _: (self.version,))
        if self.failures:
            self._abandon()

    def heed(self) -> None:
        """Raise an error if an engine has failed."""
        if self.failures:
            raise ConnectionAbortedError(self._reason())

    def _ask(self, method: str, args: Callable[[int], tuple[Any, ...]]) -> dict[int, Any]:
        if self.failures:
            return {}
        waiting = {getattr(engine, method).remote(*args(rank)): rank for rank, engine in self.engines.items()}
        answers = {}
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=self.timeout)
            for ref in ready or list(waiting):
                rank = waiting.pop(ref)
                try:
                    answers[rank] = fetch(ref, name_of(rank), self.timeout if ready else 0)
                except (WorkerError, WorkerLost) as error:
                    self.failures[rank] = error
                    if self.unblock is not None:
                        for each in self.engines:
                            waits = f"{name_of(each)} waits for one that was lost: {str(error).splitlines()[0]}"
                            self.failures.setdefault(each, BrokenWith(waits))
                        self.unblock()
                        return {}
        return answers

    def _reason(self) -> str:
        """The first failure, as one line."""
        return str(next(iter(self.failures.values()))).splitlines()[0]

    def _abandon(self) -> None:
        """Tell the engines that did not fail to discard the incomplete update. They count as failed, too."""
        reason = self._reason()
        well = {rank: engine for rank, engine in self.engines.items() if rank not in self.failures}
        calls = {rank: engine.abandon_update.remote() for rank, engine in well.items()}
        answers, failures = settled(calls, name_of, self.timeout)
        broken = {rank: WorkerError(f"{name_of(rank)}: the transfer broke: {reason}") for rank in answers}
        self.failures |= broken | failures


def name_of(rank: int) -> str:
    return f"rollout worker {rank}"


class Source:
    """Iterates over the snapshot of a policy as whole tensors, one decoder layer at a time, with adapters merged.

    Gathering a layer is a collective. So every rank must iterate to the end, also after an error of the transfer.
    ``dtype`` is that of the engines (None: of the trained weights), ``device`` that of whole tensors (None: the CPU).
    ``as_stored`` sends the experts of a mixture one by one under the names of a checkpoint, which vLLM loads.
    """

    def __init__(
        self,
        module: nn.Module,
        shards: Mapping[str, Shard],
        dtype: str | None = None,
        device: torch.device | None = None,
        *,
        as_stored: bool = False,
    ) -> None:
        self.module, self.shards, self.device = module, shards, device or torch.device("cpu")
        self.as_stored = as_stored and any(".experts." in name for name in shards)
        # The sum of a weight and its adapters must be computed before it is rounded.
        is_adapted = any(".lora_" in name for name in shards)
        self._gathered_in = getattr(torch, dtype) if dtype and not is_adapted else None
        self._names = layers(list(shards))
        self.parts = [self._infos(names, dtype) for names in self._names]

    def __iter__(self) -> Iterator[tuple[list[Info], list[Tensor]]]:
        for names, infos in zip(self._names, self.parts, strict=True):
            # No variable for the whole tensors, which would keep them alive until the next layer is gathered.
            tensors = merged(self.module, {n: self.shards[n].whole(self.device, self._gathered_in) for n in names})
            if self.as_stored:
                tensors = self._stored(tensors)
            yield infos, [tensors.pop(info.name) for info in infos]

    @property
    def largest(self) -> int:
        """The bytes of the largest tensor."""
        return max(info.bytes for part in self.parts for info in part)

    def _infos(self, names: list[str], dtype: str | None) -> list[Info]:
        plain = {name.replace(".base_layer.", "."): self.shards[name] for name in names if ".lora_" not in name}
        shapes = {name: (shard.local if shard.of is None else shard.of).shape for name, shard in plain.items()}
        empty = {name: torch.empty(shapes[name], dtype=x.local.dtype, device="meta") for name, x in plain.items()}
        if self.as_stored:
            empty = self._stored(empty)
        return [Info(name, dtype or str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in empty.items()]

    def _stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = revert_weight_conversion(self.module, tensors)
        return stored


class Gloo:
    """Sends from CPU memory by :mod:`rlprims.execution.ray._wire`, over the same connections while nothing changes."""

    def __init__(self, rank: int, host: str, timeout: float) -> None:
        self.rank, self.host, self.timeout = rank, host, timeout
        self.sender: Sender | None = None
        self.connected: list[Any] = []

    def send(self, source: Source, client: EngineClient) -> Sums:
        """Send the source, all ranks together; returns its checksums. Errors of engines are in ``client.failures``."""
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
