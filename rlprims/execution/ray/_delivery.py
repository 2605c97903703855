"""Send the policy's weights from the training ranks to the engines."""

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from rlprims.execution.ray._client import Failures, name_of
from rlprims.execution.ray._training_worker import TrainingWorker
from rlprims.execution.ray._wire import Sums
from rlprims.execution.ray._worker_group import WorkerError, WorkerGroup, WorkerLost, fetch


class Delivery(Protocol):
    """Keeps the weights as they were at the last call of ``take``, and sends them to any engine later."""

    name: str
    """The name of the backend."""

    def take(self) -> None: ...

    def deliver(self, workers: Mapping[int, Any], version: int, timeout: float) -> tuple[Failures, Sums]:
        """Send the weights to these rollout workers.

        Returns the errors of the workers that failed, and the checksums of the sent tensors (empty if unknown).
        """
        ...


class Adapters:
    """Sends only the tensors of a LoRA adapter. They are small, and Ray's object store has one copy for all engines."""

    name = "Ray's object store"

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
                fetch(ref, name_of(rank), timeout)
            except (WorkerError, WorkerLost) as error:
                failures[rank] = error
        return failures, {}


class Wire:
    """Sends the whole model from the ranks' shards to all engines at once, one layer at a time."""

    def __init__(self, trainers: WorkerGroup, processes: int, dtype: str | None, backend: str = "gloo") -> None:
        self.trainers = trainers
        self.processes = processes  # the number of processes of each engine
        self.dtype = dtype  # the dtype of the engines; None: the dtype of the trained weights
        self.name = self.backend = backend
        self.one_at_a_time = threading.Lock()

    def take(self) -> None:
        self.trainers.call(TrainingWorker.snapshot).result()

    def deliver(self, workers: Mapping[int, Any], version: int, timeout: float) -> tuple[Failures, Sums]:
        with self.one_at_a_time:
            return self._deliver(workers, version, timeout)

    def _deliver(self, workers: Mapping[int, Any], version: int, timeout: float) -> tuple[Failures, Sums]:
        # Ask first whether each engine answers: one lost engine would break the transfer to all.
        failures: Failures = {}
        for rank, ref in {rank: worker.ping.remote() for rank, worker in workers.items()}.items():
            try:
                fetch(ref, name_of(rank), timeout)
            except (WorkerError, WorkerLost) as error:
                failures[rank] = error
        well = {rank: worker for rank, worker in workers.items() if rank not in failures}
        if not well:
            return failures, {}
        sent, received, broken = self.trainers.call(
            TrainingWorker.send_weights,
            well,
            backend=self.backend,
            processes=self.processes,
            dtype=self.dtype,
            version=version,
            timeout=timeout,
        ).result(3 * timeout)[0]  # rank 0 may wait this long for the engines before it answers
        if broken:
            return failures | broken, {}
        for rank, sums in received.items():
            if sums != sent:
                failures[rank] = WorkerError(f"{name_of(rank)} does not have the weights it was sent: not all arrived")
        return failures, sent
