"""The client by which rank 0 calls the engines during a transfer of weights.

It has the four methods of vLLM's ``VLLMWeightSyncClient``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import ray

from rlprims.execution.ray._wire import Sums
from rlprims.execution.ray._worker_group import WorkerError, WorkerLost, fetch

Failures = dict[int, WorkerError | WorkerLost]
"""The reason why a worker did not receive the weights, by the rank of the worker."""


class BrokenWith(WorkerLost):
    """An engine that cannot continue, because another engine was lost in the same NCCL transfer."""


class EngineClient:
    """Makes each call on all engines at once, and waits for all answers.

    The four methods store errors in :attr:`failures` and do not raise them, because the other ranks wait for rank 0 in
    a collective that gathers the next layer. After the first failure the methods make no further calls.

    Args:
        engines: the rollout workers, by their ranks.
        processes: the number of processes of each engine. In the transfer the sender has rank 0, and the first process
            of an engine has the rank ``rank_offset``.
        version: the number of the weights.
        timeout: seconds to wait for an answer.
        unblock: a function that is called at the first failure, if the transfer has no timeout (NCCL). It must end all
            operations that wait for the engines, and all engines then count as lost. None: the other engines get an
            error when the connection closes.
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
        infos = {}
        for i, rank in enumerate(self.engines):
            mine = {"rank_offset": 1 + i * self.processes} if "rank_offset" in init_info else {}
            infos[rank] = init_info | mine
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
            raise ConnectionAbortedError(str(next(iter(self.failures.values()))).splitlines()[0])

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
                        self._all_lost(error)
                        return {}
        return answers

    def _all_lost(self, reason: Exception) -> None:
        for rank in self.engines:
            waits = BrokenWith(f"{name_of(rank)} waits for one that was lost: {str(reason).splitlines()[0]}")
            self.failures.setdefault(rank, waits)
        if self.unblock is not None:
            self.unblock()

    def _abandon(self) -> None:
        """Tell the engines that did not fail to discard the incomplete update. They count as failed, too."""
        reason = str(next(iter(self.failures.values()))).splitlines()[0]
        well = {rank: self.engines[rank] for rank in self.engines if rank not in self.failures}
        for rank, ref in {rank: engine.abandon_update.remote() for rank, engine in well.items()}.items():
            try:
                fetch(ref, name_of(rank), self.timeout)
                self.failures[rank] = WorkerError(f"{name_of(rank)}: the transfer broke: {reason}")
            except (WorkerError, WorkerLost) as error:
                self.failures[rank] = error


def name_of(rank: int) -> str:
    return f"rollout worker {rank}"
