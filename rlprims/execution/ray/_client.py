"""The engines of a transfer of weights, as rank 0 talks to them: the four calls of vLLM's ``VLLMWeightSyncClient``."""

from collections.abc import Callable, Mapping
from typing import Any

import ray

from rlprims.execution.ray._wire import Sums
from rlprims.execution.ray._worker_group import WorkerError, WorkerLost, fetch

Failures = dict[int, WorkerError | WorkerLost]
"""By the rank of a worker, the reason why it does not have the weights."""


class BrokenWith(WorkerLost):
    """An engine that waits forever for another one, which was lost in the same transfer."""


class EngineClient:
    """Makes each call on all engines at once, and waits for all of them.

    The calls raise nothing: while they run the other ranks wait for this one, to gather the next layer. After a failure
    they do nothing more, and :attr:`failures` says what happened.

    Args:
        engines: rollout workers by their ranks.
        processes: of each engine. Its first one has the rank ``rank_offset`` in the transfer, the sender has 0.
        unblock: with NCCL nothing times out: this is called at the first failure, to end what waits for the engines,
            and all of them count as lost. None: a broken connection ends the calls of the others.
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
        """Processes that take part: the sender and those of the engines."""
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
        self._ask("update", lambda _: (shared,))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All engines have everything, and use it from now on; or they abandon what they have."""
        if not self.failures:
            self.received = self._ask("finish_update", lambda _: (self.version,))
        if self.failures:
            self._abandon()

    def heed(self) -> None:
        """Raises an error if an engine has failed."""
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
        """Those that are well forget a part of an update, and are sent another one later."""
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
