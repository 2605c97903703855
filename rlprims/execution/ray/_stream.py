"""Prompts on their way to the engines, and responses on their way back."""

import math
import time
from collections import deque
from contextlib import ExitStack
from itertools import count, pairwise
from typing import Any, NamedTuple

import ray

from rlprims.data_proto import DataProto
from rlprims.execution._config import Sampling
from rlprims.execution.ray._rollouts import Rollouts
from rlprims.execution.ray._worker_group import WorkerLost, fetch

_PARTS = 4
"""Of a batch for each engine: those that wait here go to the engine that is done first."""
_CALLS = 500
"""Of an engine at once. Ray runs 1000 of an actor, and there must be room for a ping and for weights."""


class _Part(NamedTuple):
    number: int
    prompts: DataProto


class _Running(NamedTuple):
    """A part at an engine."""

    rank: int
    worker: Any
    part: _Part


class RayStream:
    """:class:`rlprims.execution.Stream` of rollout workers.

    A part goes to the engine that has the fewest rows, and waits here while every engine has enough. When a worker is
    lost its parts go to the others and to its replacement. A sample is a function of (weights, seed, sample id), so
    neither changes a response.
    """

    def __init__(
        self, rollouts: Rollouts, sampling: Sampling, *, seed: int, prompt_width: int | None, over_updates: bool = False
    ) -> None:
        self.rollouts = rollouts
        self.settings = sampling, seed, prompt_width, over_updates
        self.over_updates = over_updates
        self._numbers = count()
        self._waiting: deque[_Part] = deque()
        self._running: dict[Any, _Running] = {}  # by Ray's reference of the answer
        self._heard = time.monotonic()  # when an engine answered, or was asked after it had nothing to do
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
        self._waiting.append(_Part(number, prompts))
        self._send()
        return number

    def take(self, timeout: float | None = None) -> dict[int, DataProto]:
        if not self._running and not self._waiting:
            raise ValueError("expected a part that was submitted and not taken, got none")
        end = math.inf if timeout is None else time.monotonic() + timeout
        complete: dict[int, DataProto] = {}
        while not complete:
            self._send()
            # Half of the time for the responses, and half to answer a ping.
            silent = self._heard + self.rollouts.timeout / 2
            first, _ = ray.wait(list(self._running), timeout=max(0.0, min(silent, end) - time.monotonic()))
            if first:
                complete = self._answers()
            elif time.monotonic() >= silent:
                self._replace_silent()
            elif time.monotonic() >= end:
                break
        return complete

    def _answers(self) -> dict[int, DataProto]:
        """The parts that are complete; those of a worker that is lost are sent again."""
        complete: dict[int, DataProto] = {}
        ready, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        for ref in ready:
            if ref not in self._running:  # of a worker that was lost a moment ago
                continue
            rank, worker, part = self._running.pop(ref)
            try:
                complete[part.number] = fetch(ref, self.rollouts.name_of(rank), self.rollouts.timeout)
            except WorkerLost as error:
                self._waiting.appendleft(part)
                self._replace(rank, worker, str(error))
        self._heard = time.monotonic()
        return complete

    def _send(self) -> None:
        rows = [0] * len(self.rollouts.workers)
        for running in self._running.values():
            rows[running.rank] += len(running.part.prompts)
        while self._waiting:
            rank = rows.index(min(rows))
            enough = rows[rank] + len(self._waiting[0].prompts) > self.rollouts.rows_of_an_engine
            if self.over_updates and self.rollouts.joins:  # during an update nobody is here to send more
                enough = [running.rank for running in self._running.values()].count(rank) >= _CALLS
            if rows[rank] and enough:
                return
            part = self._waiting.popleft()
            if not self._running:
                self._heard = time.monotonic()
            worker = self.rollouts.workers[rank]
            self._running[worker.generate.remote(part.prompts, *self.settings)] = _Running(rank, worker, part)
            rows[rank] += len(part.prompts)

    def _replace_silent(self) -> None:
        """Replace workers that do not answer. One that answers is only slow."""
        end = time.monotonic() + self.rollouts.timeout / 2
        asked = {running.rank: running.worker for running in self._running.values()}
        for rank, worker, ping in [(rank, asked[rank], asked[rank].ping.remote()) for rank in sorted(asked)]:
            try:
                fetch(ping, self.rollouts.name_of(rank), max(0.0, end - time.monotonic()))
            except WorkerLost:
                self._replace(rank, worker, f"no answer within {self.rollouts.timeout:g} s")
        self._heard = time.monotonic()

    def _replace(self, rank: int, worker: Any, reason: str) -> None:
        lost = [ref for ref, running in self._running.items() if running.worker is worker]
        self._waiting.extendleft(reversed([self._running.pop(ref).part for ref in lost]))
        with self.rollouts.one_at_a_time:
            if self.rollouts.workers[rank] is worker:  # else it was replaced when weights did not reach it
                self.rollouts.replace(rank, reason)


def generate(
    rollouts: Rollouts, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None
) -> DataProto:
    """Every prompt's response, in the prompts' order."""
    engines = len(rollouts.workers)
    count = _PARTS * engines if rollouts.joins and engines > 1 else engines
    parts = _divided(prompts, count)
    with RayStream(rollouts, sampling, seed=seed, prompt_width=prompt_width) as stream:
        numbers = [stream.submit(part) for part in parts]
        answers = dict[int, DataProto]()
        while len(answers) < len(parts):
            answers |= stream.take()
    return DataProto.concat([answers[number] for number in numbers])


def _divided(prompts: DataProto, count: int) -> list[DataProto]:
    """About equal parts. Neighbours with the same prompt stay together: an engine reads it once for all of them."""
    ids, least = prompts["prompt_ids"].tolist(), len(prompts) / count
    ends = [0]
    for i in range(1, len(ids)):
        if i - ends[-1] >= least and (ids[i] != ids[i - 1] or i - ends[-1] >= 2 * least):
            ends.append(i)
    return [prompts[i:j] for i, j in pairwise([*ends, len(ids)])]
