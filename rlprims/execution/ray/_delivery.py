"""How the policy's weights get from the ranks to the engines."""

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import ray

from rlprims.execution.ray._training_worker import TrainingWorker
from rlprims.execution.ray._wire import Endpoint, Sums, cancel
from rlprims.execution.ray._worker_group import WorkerError, WorkerGroup, WorkerLost, fetch

Failures = dict[int, WorkerError | WorkerLost]
"""By the rank of a worker, the reason why it does not have the weights."""


class Delivery(Protocol):
    """The weights of the moment of :meth:`take`, for any engine at any later time."""

    def take(self) -> None: ...

    def deliver(self, workers: Mapping[int, Any], version: int, timeout: float) -> tuple[Failures, Sums]:
        """Send to these rollout workers; returns those that failed, and the known checksums of the sent tensors."""
        ...


class Adapters:
    """Of LoRA alone: small, and held by reference in Ray's object store, once for all engines."""

    def __init__(self, trainers: WorkerGroup) -> None:
        self.trainers = trainers
        self.reference: Any = None

    def take(self) -> None:
        pending = self.trainers.call(TrainingWorker.adapters)
        pending.result()
        self.reference = pending.refs[0]

    def deliver(self, workers: Mapping[int, Any], version: int, timeout: float) -> tuple[Failures, Sums]:
        failures: Failures = {}
        for rank, ref in {
            rank: worker.load.remote(self.reference, version) for rank, worker in workers.items()
        }.items():
            try:
                fetch(ref, _who(rank), timeout)
            except (WorkerError, WorkerLost) as error:
                failures[rank] = error
        return failures, {}


class Wire:
    """The whole model, from the ranks' shards to all engines at once, a layer at a time."""

    def __init__(self, trainers: WorkerGroup, processes: int, dtype: str | None) -> None:
        self.trainers = trainers
        self.processes = processes  # of each engine
        self.dtype = dtype  # of an engine; None: as it is trained
        self.one_at_a_time = threading.Lock()

    def take(self) -> None:
        self.trainers.call(TrainingWorker.snapshot).result()

    def deliver(self, workers: Mapping[int, Any], version: int, timeout: float) -> tuple[Failures, Sums]:
        with self.one_at_a_time:
            return self._deliver(workers, version, timeout)

    def _deliver(self, workers: Mapping[int, Any], version: int, timeout: float) -> tuple[Failures, Sums]:
        address = self.trainers.call(TrainingWorker.listen, timeout).result()
        size = len(workers) * self.processes
        sending = self.trainers.call(TrainingWorker.send_weights, size, self.dtype)
        receiving = {}
        for i, (rank, worker) in enumerate(workers.items()):
            endpoint = Endpoint(address[0], address[1], 1 + i * self.processes, 1 + size, timeout)
            receiving[worker.receive.remote(endpoint, version)] = rank
        failures: Failures = {}
        received: dict[int, Sums] = {}
        while receiving:
            ready, _ = ray.wait(list(receiving), timeout=timeout)
            for ref in ready or list(receiving):
                rank = receiving.pop(ref)
                try:
                    received[rank] = fetch(ref, _who(rank), timeout if ready else 0)
                except (WorkerError, WorkerLost) as error:
                    failures[rank] = error
                    cancel(address, str(error).splitlines()[0])
        try:
            sent: Sums = sending.result()[0]
        except WorkerError:
            if not failures:
                raise
            sent = {}
        for rank, sums in received.items():
            if sums != sent:
                failures[rank] = WorkerError(f"{_who(rank)} does not have the weights it was sent: not all arrived")
        return failures, sent


def _who(rank: int) -> str:
    return f"rollout worker {rank}"
