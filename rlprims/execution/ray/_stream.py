"""Send prompts to the engines, and receive their responses."""

import math
import time
from collections import deque
from contextlib import ExitStack
from itertools import count, pairwise
from typing import Any, NamedTuple

import ray

from rlprims.data_proto import DataProto
from rlprims.execution import Sampling
from rlprims.execution.ray._calls import WorkerLost, fetch
from rlprims.execution.ray._head import wait
from rlprims.execution.ray._rollouts import Rollouts

_PARTS = 4
"""The number of parts of a batch for each engine. A waiting part goes to the engine that is done first."""
_CALLS = 500
"""The most calls that an engine runs at once. Ray's limit is 1000; pings and transfers of weights must still run."""


class _Running(NamedTuple):
    """A part that an engine is sampling."""

    rank: int
    worker: Any
    number: int
    prompts: DataProto


class RayStream:
    """Implements :class:`rlprims.execution.Stream` on rollout workers.

    A part goes to the engine that has the fewest rows, or waits in the driver if every engine has enough. The parts of
    a lost worker go to the others and to its replacement; a response does not depend on the engine.
    """

    def __init__(
        self, rollouts: Rollouts, sampling: Sampling, *, seed: int, prompt_width: int | None, over_updates: bool = False
    ) -> None:
        self.rollouts = rollouts
        self.settings = sampling, seed, prompt_width, over_updates
        self.over_updates = over_updates
        self._numbers = count()
        self._waiting: deque[tuple[int, DataProto]] = deque()
        self._running: dict[Any, _Running] = {}  # by Ray's reference of the answer
        self._heard = time.monotonic()  # when the last answer came, or the first call began while none was running
        self._held = ExitStack()

    def __enter__(self) -> "RayStream":
        if not self.over_updates:
            self._held.enter_context(self.rollouts.one_at_a_time)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in {running.worker for running in self._running.values()}:
            worker.abandon.remote()
        self._running.clear()
        self._waiting.clear()
        self._held.close()

    def submit(self, prompts: DataProto) -> int:
        number = next(self._numbers)
        self._waiting.append((number, prompts))
        self._send()
        return number

    def take(self, timeout: float | None = None) -> dict[int, DataProto]:
        if not self._running and not self._waiting:
            raise ValueError("expected a part that was submitted and not taken, got none")
        end = math.inf if timeout is None else time.monotonic() + timeout
        complete: dict[int, DataProto] = {}
        while not complete:
            self._send()
            # Half of the timeout is for the responses, and half is for a ping.
            silent = self._heard + self.rollouts.timeout / 2
            first, _ = wait(list(self._running), max(0.0, min(silent, end) - time.monotonic()), "rollout")
            if first:
                complete = self._answers()
            elif time.monotonic() >= silent:
                self._replace_silent()
            elif time.monotonic() >= end:
                break
        return complete

    def _answers(self) -> dict[int, DataProto]:
        """Return the parts that are complete. Parts of a lost worker are queued again."""
        complete: dict[int, DataProto] = {}
        ready, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        for ref in ready:
            if ref not in self._running:  # its worker was lost in this loop, and the part is queued again
                continue
            rank, worker, number, prompts = self._running.pop(ref)
            try:
                complete[number] = fetch(ref, self.rollouts.name_of(rank), self.rollouts.timeout)
            except WorkerLost as error:
                self._waiting.appendleft((number, prompts))
                self._replace(rank, worker, error)
        self._heard = time.monotonic()
        return complete

    def _send(self) -> None:
        """Send waiting parts to the engines, until every engine has enough rows."""
        rows = [0] * len(self.rollouts.workers)
        for running in self._running.values():
            rows[running.rank] += len(running.prompts)
        while self._waiting:
            rank = rows.index(min(rows))
            enough = rows[rank] + len(self._waiting[0][1]) > self.rollouts.rows_of_an_engine
            if self.over_updates and self.rollouts.joins:  # the driver cannot send more parts during an update
                enough = [running.rank for running in self._running.values()].count(rank) >= _CALLS
            if rows[rank] and enough:
                return
            number, prompts = self._waiting.popleft()
            if not self._running:
                self._heard = time.monotonic()
            worker = self.rollouts.workers[rank]
            call = worker.generate.remote(prompts, *self.settings)
            self._running[call] = _Running(rank, worker, number, prompts)
            rows[rank] += len(prompts)

    def _replace_silent(self) -> None:
        """Replace the workers that do not answer a ping. A worker that answers is slow, and is kept."""
        end = time.monotonic() + self.rollouts.timeout / 2
        asked = {running.rank: running.worker for running in self._running.values()}
        for rank, worker, ping in [(rank, asked[rank], asked[rank].ping.remote()) for rank in sorted(asked)]:
            try:
                fetch(ping, self.rollouts.name_of(rank), max(0.0, end - time.monotonic()))
            except WorkerLost as error:
                silent = WorkerLost(f"{self.rollouts.name_of(rank)} did not answer within {self.rollouts.timeout:g} s")
                self._replace(rank, worker, error if hasattr(error, "__notes__") else silent)
        self._heard = time.monotonic()

    def _replace(self, rank: int, worker: Any, reason: Exception) -> None:
        lost = [ref for ref, running in self._running.items() if running.worker is worker]
        self._waiting.extendleft(reversed([self._running.pop(ref)[2:] for ref in lost]))
        with self.rollouts.one_at_a_time:
            if self.rollouts.workers[rank] is worker:  # otherwise a failed transfer of weights has replaced it already
                self.rollouts.replace(rank, reason)


def generate(
    rollouts: Rollouts, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None
) -> DataProto:
    """Sample a response to each prompt; returns them in the order of the prompts."""
    if prompt_width is None:  # the longest of the batch, and not of each part
        prompt_width = max(map(len, prompts["prompt_ids"]), default=0)
    engines = len(rollouts.workers)
    parts = _divided(prompts, _PARTS * engines if rollouts.joins and engines > 1 else engines)
    with RayStream(rollouts, sampling, seed=seed, prompt_width=prompt_width) as stream:
        numbers = [stream.submit(part) for part in parts]
        answers = dict[int, DataProto]()
        while len(answers) < len(parts):
            answers |= stream.take()
    return DataProto.concat([answers[number] for number in numbers])


def _divided(prompts: DataProto, count: int) -> list[DataProto]:
    """Divide prompts into about ``count`` similar parts, without parting equal ones: an engine reads a prompt once."""
    ids, least, ends = prompts["prompt_ids"].tolist(), len(prompts) / count, [0]
    for i in range(1, len(ids)):
        if i - ends[-1] >= least and (ids[i] != ids[i - 1] or i - ends[-1] >= 2 * least):
            ends.append(i)
    return [prompts[i:j] for i, j in pairwise([*ends, len(ids)])]
