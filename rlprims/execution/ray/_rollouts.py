"""The rollout workers, as the driver uses them: their weights, their replacement, and the devices that they share."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import ray

from rlprims._files import details_of
from rlprims.data_proto import DataProto
from rlprims.execution import RayConfig, Sampling
from rlprims.execution.ray._calls import WorkerError, WorkerLost, fetch, settled
from rlprims.execution.ray._head import start
from rlprims.execution.ray._training_worker import TrainingWorker
from rlprims.execution.ray._transfer import BrokenWith, Failures, name_of
from rlprims.execution.ray._wire import Sums
from rlprims.execution.ray._worker_group import WorkerGroup

log = logging.getLogger(__name__)


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
        loading = {rank: worker.load.remote(self.reference, version) for rank, worker in workers.items()}
        return settled(loading, name_of, timeout)[1], {}


class Wire:
    """Sends the whole model from the ranks' shards to all engines at once, one layer at a time."""

    def __init__(self, trainers: WorkerGroup, processes: int, dtype: str | None, backend: str = "gloo") -> None:
        self.trainers, self.name, self.one_at_a_time = trainers, backend, threading.Lock()
        self.processes, self.dtype = processes, dtype  # of each engine; no dtype: that of the trained weights

    def take(self) -> None:
        self.trainers.call(TrainingWorker.snapshot).result()

    def deliver(self, workers: Mapping[int, Any], version: int, timeout: float) -> tuple[Failures, Sums]:
        with self.one_at_a_time:
            # Ask first whether each engine answers: one lost engine would break the transfer to all.
            _, failures = settled({rank: worker.ping.remote() for rank, worker in workers.items()}, name_of, timeout)
            well = {rank: worker for rank, worker in workers.items() if rank not in failures}
            if not well:
                return failures, {}
            how: Any = {"backend": self.name, "processes": self.processes, "dtype": self.dtype}
            how |= {"version": version, "timeout": timeout}
            sending = self.trainers.call(TrainingWorker.send_weights, well, **how)
            sent, received, broken = sending.result(3 * timeout)[0]  # so long rank 0 may wait for the engines
            if broken:
                return failures | broken, {}
            incomplete = {rank for rank, sums in received.items() if sums != sent}
            what = "does not have the weights it was sent: not all arrived"
            return failures | {rank: WorkerError(f"{name_of(rank)} {what}") for rank in incomplete}, sent


Delivery: TypeAlias = Adapters | Wire
"""Keeps the weights as they were at the last call of ``take``, and sends them to any engine later by ``deliver``, which
returns the errors of the workers that failed, and the checksums of the sent tensors (empty if unknown)."""


class Rollouts:
    """Rollout workers, each of which is replaced if it dies or hangs.

    The new worker gets the newest weights from the ranks, and the prompts of the lost one from the stream.
    """

    def __init__(
        self, start: Callable[[int], tuple[Any, Any]], count: int, cluster: RayConfig, delivery: Delivery, *, rows: int
    ) -> None:
        self.start = start  # start(rank) returns a new worker, and the pending call that builds its engine
        self.cluster, self.delivery, self.timeout = cluster, delivery, cluster.call_timeout
        self.replacements = self.version = 0
        self.sent: Sums = {}
        self.check: Callable[[Sequence[float]], str | None] = lambda scores: None
        self.probe: list[int] = []
        self.stopped = False
        self.one_at_a_time = threading.RLock()  # for transfers of weights, and streams that end before one
        started = [start(rank) for rank in range(count)]
        self.workers = [worker for worker, _ in started]
        built = [fetch(building, self.name_of(rank), math.inf) for rank, (_, building) in enumerate(started)]
        self.frees_memory = all(engine.frees_memory for engine in built)  # whether engines free memory when they sleep
        self.joins = all(engine.joins for engine in built)
        # Twice what an engine samples at once, so that it does not wait for the driver; 0: one call at a time.
        self.rows_of_an_engine = 2 * rows if self.joins else 0

    def sync(self, version: int, probe: list[int], check: Callable[[Sequence[float]], str | None]) -> None:
        """Send the newest weights to every worker, check them, and replace the workers that fail.

        ``check`` gets a worker's log-probs of the tokens ``probe``; it returns an error as text, or None.
        """
        self.version, self.probe, self.check = version, probe, check
        self.send()

    def send(self) -> None:
        """Send the newest weights again, as :meth:`sync` does. If a batch is being sampled, wait for its end first."""
        with self.one_at_a_time:
            everyone = dict(enumerate(self.workers))
            failed = self._deliver(everyone)
            # A transfer that fails for one worker fails for all, so all that are not lost get the weights again.
            again = {rank: self.workers[rank] for rank, error in failed.items() if not isinstance(error, WorkerLost)}
            if again:
                log.warning("weights did not reach %s; they are sent again", ", ".join(map(self.name_of, again)))
                failed = {rank: error for rank, error in failed.items() if rank not in again} | self._deliver(again)
            checks = {rank: self._ask(rank) for rank in everyone if rank not in failed}
            for rank, asked in checks.items():
                try:
                    self._verify(rank, *asked)
                except (WorkerError, WorkerLost) as error:
                    failed[rank] = error
            for rank, reason in failed.items():
                self.replace(rank, reason, counts=not isinstance(reason, BrokenWith))

    def time_plain_sampling(self, batch: DataProto, sampling: Sampling | None = None) -> float | None:
        """See :meth:`rlprims.execution.ray.RayExecution.time_plain_sampling`. The batch is divided equally."""
        begun = time.perf_counter()
        parts = batch.split(max(1, -(-len(batch) // len(self.workers)))) or [batch]
        asked = [self.workers[i].sample_plainly.remote(part, sampling) for i, part in enumerate(parts)]
        sampled = [fetch(ref, self.name_of(rank), self.timeout) for rank, ref in enumerate(asked)]
        return time.perf_counter() - begun if all(sampled) else None

    def sleep(self, level: int) -> None:
        """Free the engines' memory. :meth:`wake` replaces a lost worker, because until then ranks use its device."""
        self._all_but_lost("sleep", level)

    def wake(self) -> None:
        for rank, error in self._all_but_lost("wake").items():
            self.replace(rank, error)

    def _all_but_lost(self, method: str, *args: Any) -> Failures:
        """Call a method of all workers; returns the errors of the workers that were lost."""
        calls = {rank: getattr(worker, method).remote(*args) for rank, worker in enumerate(self.workers)}
        _, failures = settled(calls, self.name_of, self.timeout)
        for error in failures.values():
            if not isinstance(error, WorkerLost):
                raise error
        return failures

    def stop(self) -> None:
        """Stop all workers. A thread that waits for responses gets an error."""
        self.stopped = True
        if self.cluster.tensor_parallel_size > 1:  # a process that is killed leaves the shared memory of its children
            ended = [worker.__ray_terminate__.remote() for worker in self.workers]
            ray.wait(ended, num_returns=len(ended), timeout=10.0)
        for worker in self.workers:
            ray.kill(worker)

    def _deliver(self, workers: dict[int, Any]) -> Failures:
        failures, sent = self.delivery.deliver(workers, self.version, self.timeout)
        self.sent = sent or self.sent
        return failures

    def _ask(self, rank: int) -> tuple[Any, Any]:
        """Ask a worker for its probe scores and for its differing tensors; returns the two pending answers."""
        worker = self.workers[rank]
        return worker.score.remote(self.probe), worker.mismatched_tensors.remote(self.sent) if self.sent else None

    def _verify(self, rank: int, scoring: Any, comparing: Any) -> None:
        wrong = self.check(fetch(scoring, self.name_of(rank), self.timeout))
        unlike = fetch(comparing, self.name_of(rank), self.timeout) if comparing is not None else []
        if unlike:
            wrong = f"{len(unlike)} tensors differ, {unlike[0]} among them"
        if wrong is not None:
            raise WorkerError(f"{self.name_of(rank)} does not have the weights it was sent: {wrong}")

    def replace(self, rank: int, reason: Exception, *, counts: bool = True) -> None:
        """Replace a lost worker by a new one, which gets the newest weights first.

        Without ``counts`` it is not one of ``max_replacements``: for a worker that failed because another one was lost.
        """
        if self.stopped:
            raise WorkerLost(f"{self.name_of(rank)}: stopped")
        if counts and self.replacements == self.cluster.max_replacements:
            raise WorkerLost(f"{reason}; {self.replacements} were replaced already") from reason
        self.replacements += counts
        details = details_of(reason)
        log.warning("%s; it is replaced%s", reason, f"; details: {details}" if details else "")
        ray.kill(self.workers[rank])
        self.workers[rank], building = self.start(rank)
        start(partial(fetch, building, self.name_of(rank), math.inf), self.cluster.start_timeout, time.monotonic())
        for failure in self._deliver({rank: self.workers[rank]}).values():
            raise failure
        self._verify(rank, *self._ask(rank))

    def name_of(self, rank: int) -> str:
        return f"rollout worker {rank} of {len(self.workers)}"


class DeviceSharing:
    """Gives the devices that ranks and engines share to one side. First the other side frees its memory.

    Ranks move their weights and optimizers to the CPU. Engines sleep; after ``level`` 2 they need their weights again.
    If ``level`` is None, ranks and engines have devices of their own, and the methods do nothing.
    """

    def __init__(self, trainers: WorkerGroup, rollouts: Rollouts, level: int | None) -> None:
        self.trainers, self.rollouts, self.level = trainers, rollouts, level
        self.engines_awake = True

    def give_to_engines(self, *, resend: bool = True) -> None:
        """Give the devices to the engines. With ``resend=False`` the caller sends new weights next."""
        if self.level is None or self.engines_awake:
            return
        self.trainers.call(TrainingWorker.offload).result()
        self.rollouts.wake()
        if resend and self.level == 2:
            self.rollouts.send()
        self.engines_awake = True

    def give_to_ranks(self) -> None:
        if self.level is None or not self.engines_awake:
            return
        self.rollouts.sleep(self.level)
        self.trainers.call(TrainingWorker.onload).result()
        self.engines_awake = False
