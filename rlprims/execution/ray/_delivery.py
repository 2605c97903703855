"""How the policy's weights get from the ranks to the engines."""

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from rlprims.execution._config import RayConfig
from rlprims.execution.ray._client import Failures, name_of
from rlprims.execution.ray._training_worker import TrainingWorker
from rlprims.execution.ray._wire import Sums
from rlprims.execution.ray._worker_group import WorkerError, WorkerGroup, WorkerLost, fetch


class Delivery(Protocol):
    """The weights of the moment of :meth:`take`, for any engine at any later time."""

    name: str
    """How they are sent."""

    def take(self) -> None: ...

    def deliver(self, workers: Mapping[int, Any], version: int, timeout: float) -> tuple[Failures, Sums]:
        """Send to these rollout workers; returns those that failed, and the known checksums of the sent tensors."""
        ...


class Adapters:
    """Of LoRA alone: small, and held by reference in Ray's object store, once for all engines."""

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
    """The whole model, from the ranks' shards to all engines at once, a layer at a time."""

    def __init__(self, trainers: WorkerGroup, processes: int, dtype: str | None, backend: str = "gloo") -> None:
        self.trainers = trainers
        self.processes = processes  # of each engine
        self.dtype = dtype  # of an engine; None: as it is trained
        self.name = self.backend = backend
        self.one_at_a_time = threading.Lock()

    def take(self) -> None:
        self.trainers.call(TrainingWorker.snapshot).result()

    def deliver(self, workers: Mapping[int, Any], version: int, timeout: float) -> tuple[Failures, Sums]:
        with self.one_at_a_time:
            return self._deliver(workers, version, timeout)

    def _deliver(self, workers: Mapping[int, Any], version: int, timeout: float) -> tuple[Failures, Sums]:
        # One that is dead already must not break the transfer of the others.
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
        ).result(3 * timeout)[0]  # rank 0 waits for the engines that long, and answers then
        if broken:
            return failures | broken, {}
        for rank, sums in received.items():
            if sums != sent:
                failures[rank] = WorkerError(f"{name_of(rank)} does not have the weights it was sent: not all arrived")
        return failures, sent


def backend_of(cluster: RayConfig, device: str) -> str:
    """How whole weights go to the engines: ``ray.weight_transfer``, or what fits the devices.

    Raises:
        ValueError: the setting needs GPUs, and there are none.
    """
    chosen = cluster.weight_transfer
    if chosen in ("nccl", "ipc") and device != "cuda":
        raise ValueError(
            f"ray.weight_transfer={chosen}: expected models on GPUs, got model.device {device}; use auto or gloo"
        )
    if chosen != "auto":
        return chosen
    if device != "cuda" or cluster.engine == "hf":
        return "gloo"
    if cluster.colocate:
        return "ipc" if cluster.tensor_parallel_size == 1 else "gloo"
    return "nccl" if cluster.has_whole_devices else "gloo"
