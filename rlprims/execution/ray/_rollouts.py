"""The rollout workers, as the driver uses them: it sends them weights, and replaces workers that die."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray

from rlprims.data_proto import DataProto
from rlprims.execution._config import Sampling
from rlprims.execution.ray._client import BrokenWith, Failures
from rlprims.execution.ray._delivery import Delivery
from rlprims.execution.ray._wire import Sums
from rlprims.execution.ray._worker_group import WorkerError, WorkerLost, fetch

log = logging.getLogger(__name__)


class Rollouts:
    """Rollout workers, each of which is replaced if it dies or hangs.

    The new worker gets the newest weights from the training ranks, and the prompts of the lost one from the stream,
    which keeps them. A sample is a function of (weights, seed, sample id), so the batch is the same as without the
    failure.
    """

    def __init__(
        self,
        start: Callable[[int], tuple[Any, Any]],
        count: int,
        *,
        timeout: float,
        start_timeout: float,
        max_replacements: int,
        max_rows: int,
        delivery: Delivery,
    ) -> None:
        self.delivery = delivery
        self.start = start  # start(rank) returns a new worker, and the pending call that builds its engine
        self.timeout = timeout
        self.start_timeout = start_timeout
        self.max_replacements = max_replacements
        self.replacements = 0
        self.version = 0
        self.sent: Sums = {}
        self.check: Callable[[Sequence[float]], str | None] = lambda scores: None
        self.probe: list[int] = []
        self.stopped = False
        self.one_at_a_time = threading.RLock()  # for transfers of weights, and streams that end before one
        started = [start(rank) for rank in range(count)]
        self.workers = [worker for worker, _ in started]
        built = [fetch(building, self.name_of(rank), start_timeout) for rank, (_, building) in enumerate(started)]
        self.frees_memory = all(engine.frees_memory for engine in built)  # whether engines free memory when they sleep
        self.joins = all(engine.joins for engine in built)
        # Twice the rows that an engine samples at once, so that it does not wait for the driver. An engine that cannot
        # join requests gets one call at a time.
        self.rows_of_an_engine = 2 * max_rows if self.joins else 0

    def sync(self, version: int, probe: list[int], check: Callable[[Sequence[float]], str | None]) -> None:
        """Send the newest weights to every worker, check them, and replace the workers that fail.

        ``check`` gets a worker's log-probs of the tokens ``probe``; it returns an error as text, or None.

        Raises:
            WorkerLost: a replacement fails, too, or there were ``max_replacements`` already.
        """
        self.version, self.probe, self.check = version, probe, check
        self.send()

    def send(self) -> None:
        """Send the newest weights again, as :meth:`sync` does. If a batch is being sampled, wait for its end first."""
        with self.one_at_a_time:
            self._send()

    def _send(self) -> None:
        everyone = dict(enumerate(self.workers))
        failed = self._deliver(everyone)
        # If a transfer fails for one worker it fails for all, so all workers that are not lost get the weights again.
        again = {rank: self.workers[rank] for rank, error in failed.items() if not isinstance(error, WorkerLost)}
        if again:
            log.warning(
                "weights did not reach %s; they are sent again", ", ".join(self.name_of(rank) for rank in again)
            )
            failed = {rank: error for rank, error in failed.items() if rank not in again} | self._deliver(again)
        checks = {rank: self._ask(rank) for rank in everyone if rank not in failed}
        for rank, asked in checks.items():
            try:
                self._verify(rank, *asked)
            except (WorkerError, WorkerLost) as error:
                failed[rank] = error
        for rank, reason in failed.items():
            self.replace(rank, str(reason), counts=not isinstance(reason, BrokenWith))

    def time_plain_sampling(self, batch: DataProto, sampling: Sampling | None = None) -> float | None:
        """Time the engines' own ``generate`` on the prompts of a batch, divided equally.

        Returns seconds, or None if the engines have no such function.
        """
        begun = time.perf_counter()
        parts = zip(self.workers, self.equal_parts(batch), strict=False)
        asked = [worker.sample_plainly.remote(part, sampling) for worker, part in parts]
        sampled = [fetch(ref, self.name_of(rank), self.timeout) for rank, ref in enumerate(asked)]
        return time.perf_counter() - begun if all(sampled) else None

    def equal_parts(self, prompts: DataProto) -> list[DataProto]:
        """Divide a batch into parts of equal size, at most one for each worker."""
        return prompts.split(max(1, -(-len(prompts) // len(self.workers)))) or [prompts]

    def sleep(self, level: int) -> None:
        """Free the engines' memory. :meth:`wake` replaces a lost worker, because until then ranks use its device."""
        for rank, ref in enumerate([worker.sleep.remote(level) for worker in self.workers]):
            with suppress(WorkerLost):
                fetch(ref, self.name_of(rank), self.timeout)

    def wake(self) -> None:
        for rank, ref in enumerate([worker.wake.remote() for worker in self.workers]):
            try:
                fetch(ref, self.name_of(rank), self.timeout)
            except WorkerLost as error:
                self.replace(rank, str(error))

    def stop(self) -> None:
        """Stop all workers. A thread that waits for responses gets an error."""
        self.stopped = True
        for worker in self.workers:
            ray.kill(worker)

    def _deliver(self, workers: dict[int, Any]) -> Failures:
        failures, sent = self.delivery.deliver(workers, self.version, self.timeout)
        self.sent = sent or self.sent
        return failures

    def _ask(self, rank: int) -> tuple[Any, Any]:
        """Ask a worker for its probe scores and for its differing tensors; returns the two pending answers."""
        worker = self.workers[rank]
        return worker.score.remote(self.probe), worker.unlike.remote(self.sent) if self.sent else None

    def _verify(self, rank: int, scoring: Any, comparing: Any) -> None:
        wrong = self.check(fetch(scoring, self.name_of(rank), self.timeout))
        unlike = fetch(comparing, self.name_of(rank), self.timeout) if comparing is not None else []
        if unlike:
            wrong = f"{len(unlike)} tensors differ, {unlike[0]} among them"
        if wrong is not None:
            raise WorkerError(f"{self.name_of(rank)} does not have the weights it was sent: {wrong}")

    def replace(self, rank: int, reason: str, *, counts: bool = True) -> None:
        """Replace a lost worker. The new worker is used only after it has the newest weights.

        With ``counts=False`` the replacement does not count towards ``max_replacements``: use it for a worker that only
        failed because another one was lost.
        """
        if self.stopped:
            raise WorkerLost(f"{self.name_of(rank)}: stopped")
        if counts and self.replacements == self.max_replacements:
            raise WorkerLost(f"{self.name_of(rank)}: {reason}; {self.replacements} were replaced already")
        self.replacements += counts
        log.warning("%s: %s; it is replaced", self.name_of(rank), reason)
        ray.kill(self.workers[rank])
        self.workers[rank], building = self.start(rank)
        fetch(building, self.name_of(rank), self.start_timeout)
        for failure in self._deliver({rank: self.workers[rank]}).values():
            raise failure
        self._verify(rank, *self._ask(rank))

    def name_of(self, rank: int) -> str:
        return f"rollout worker {rank} of {len(self.workers)}"
