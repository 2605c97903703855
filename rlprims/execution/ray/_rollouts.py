"""The driver of the rollout workers: it sends requests, and replaces workers that die."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray

from rlprims.data_proto import DataProto
from rlprims.execution.ray._worker_group import WorkerError, WorkerLost, fetch

log = logging.getLogger(__name__)


class Rollouts:
    """Rollout workers that may die. The driver keeps the list of what is asked for, and the newest weights.

    A worker that dies or hangs is replaced, gets the newest weights, and its prompts are run again: as a sample is a
    function of (weights, seed, sample id), the batch is the one that would have been.
    """

    def __init__(
        self,
        start: Callable[[int], tuple[Any, Any]],
        count: int,
        *,
        timeout: float,
        start_timeout: float,
        max_replacements: int,
    ) -> None:
        self.start = start  # of a rank: a new worker, and the call that builds its engine
        self.timeout = timeout
        self.start_timeout = start_timeout
        self.max_replacements = max_replacements
        self.replacements = 0
        self.weights: tuple[Any, int] = (None, 0)
        self.check: Callable[[Sequence[float]], str | None] = lambda scores: None
        self.probe: list[int] = []
        self.stopped = False
        started = [start(rank) for rank in range(count)]
        self.workers = [worker for worker, _ in started]
        built = [fetch(building, self._who(rank), start_timeout) for rank, (_, building) in enumerate(started)]
        self.frees_memory = all(built)  # when it sleeps

    def sync(
        self, weights: Any, version: int, probe: list[int], check: Callable[[Sequence[float]], str | None]
    ) -> None:
        """The same weights to every worker, each verified by its scores of the probe; one that fails is replaced.

        Raises:
            WorkerLost: replacements fail as well.
        """
        self.weights, self.probe, self.check = (weights, version), probe, check
        self.send()

    def send(self) -> None:
        """The newest weights again, as :meth:`sync` does."""
        sent = [self._send(rank) for rank in range(len(self.workers))]
        for rank, answers in enumerate(sent):
            try:
                self._verify(rank, *answers)
            except (WorkerError, WorkerLost) as error:
                self._replace(rank, str(error))

    def generate(self, prompts: DataProto, *args: Any) -> DataProto:
        """Every prompt's response, in the prompts' order."""
        chunks = prompts.split(max(1, -(-len(prompts) // len(self.workers)))) or [prompts]
        done: dict[int, DataProto] = {}
        running = {self.workers[i].generate.remote(chunk, *args): i for i, chunk in enumerate(chunks)}
        while running:
            ready, _ = ray.wait(list(running), timeout=self.timeout)
            failed: dict[int, str] = {} if ready else dict.fromkeys(running.values(), "no answer in time")
            for ref in ready:
                i = running.pop(ref)
                try:
                    done[i] = fetch(ref, self._who(i), self.timeout)
                except WorkerLost as error:
                    failed[i] = str(error)
            running = {ref: i for ref, i in running.items() if i not in failed}
            for i, reason in failed.items():
                self._replace(i, reason)
                running[self.workers[i].generate.remote(chunks[i], *args)] = i
        return DataProto.concat([done[i] for i in range(len(chunks))])

    def sleep(self, level: int) -> None:
        """Give memory back. A worker that is lost is replaced when it is to wake: until then its place is taken."""
        for rank, ref in enumerate([worker.sleep.remote(level) for worker in self.workers]):
            with suppress(WorkerLost):
                fetch(ref, self._who(rank), self.timeout)

    def wake(self) -> None:
        for rank, ref in enumerate([worker.wake.remote() for worker in self.workers]):
            try:
                fetch(ref, self._who(rank), self.timeout)
            except WorkerLost as error:
                self._replace(rank, str(error))

    def stop(self) -> None:
        """Also of what another thread is sampling, which is told so."""
        self.stopped = True
        for worker in self.workers:
            ray.kill(worker)

    def _send(self, rank: int) -> tuple[Any, Any]:
        """The newest weights and then the probe, without waiting: a worker does one after the other."""
        worker = self.workers[rank]
        return worker.load.remote(*self.weights), worker.score.remote(self.probe)

    def _verify(self, rank: int, loading: Any, scoring: Any) -> None:
        fetch(loading, self._who(rank), self.timeout)
        wrong = self.check(fetch(scoring, self._who(rank), self.timeout))
        if wrong is not None:
            raise WorkerError(f"{self._who(rank)} does not have the weights it was sent: {wrong}")

    def _replace(self, rank: int, reason: str) -> None:
        """A new worker in the place of a lost one, ready only with the newest weights."""
        if self.stopped:
            raise WorkerLost(f"{self._who(rank)}: stopped")
        if self.replacements == self.max_replacements:
            raise WorkerLost(f"{self._who(rank)}: {reason}; {self.replacements} were replaced already")
        self.replacements += 1
        log.warning("%s: %s; it is replaced", self._who(rank), reason)
        ray.kill(self.workers[rank])
        self.workers[rank], building = self.start(rank)
        fetch(building, self._who(rank), self.start_timeout)
        self._verify(rank, *self._send(rank))

    def _who(self, rank: int) -> str:
        return f"rollout worker {rank} of {len(self.workers)}"
