"""Prompts on their way to the engines, and responses on their way back."""

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


class RayStream:
    """:class:`rlprims.execution.Stream` of rollout workers.

    A part goes to the engine that has the fewest rows, and waits here while every engine has enough. When a worker is
    lost its parts go to the others and to its replacement. A sample is a function of (weights, seed, sample id), so
    neither changes a response.
    """

    def __init__(
        self, rollouts: Rollouts, sampling: Sampling, *, seed: int, prompt_width: int, over_updates: bool = False
    ) -> None:
        self.rollouts = rollouts
        self.settings = sampling, seed, prompt_width, over_updates
        self.over_updates = over_updates
        self._numbers = count()
        self._waiting: deque[_Part] = deque()
        self._running: dict[Any, tuple[int, _Part]] = {}  # by Ray's reference of the answer
        self._held = ExitStack()

    def __enter__(self) -> "RayStream":
        if not self.over_updates:
            self._held.enter_context(self.rollouts.one_at_a_time)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in {rank for rank, _ in self._running.values()}:
            self.rollouts.workers[rank].abandon.remote()
        self._running.clear()
        self._waiting.clear()
        self._held.close()

    def submit(self, prompts: DataProto) -> int:
        number = next(self._numbers)
        self._waiting.append(_Part(number, prompts))
        self._send()
        return number

    def take(self) -> dict[int, DataProto]:
        if not self._running and not self._waiting:
            raise ValueError("expected a part that was submitted and not taken, got none")
        complete: dict[int, DataProto] = {}
        while not complete:
            self._send()
            # Half of the time for the responses, and half to answer a ping.
            first, _ = ray.wait(list(self._running), timeout=self.rollouts.timeout / 2)
            if not first:
                self._replace_silent()
                continue
            ready, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
            for ref in ready:
                if ref not in self._running:  # of a worker that was lost a moment ago
                    continue
                rank, part = self._running.pop(ref)
                try:
                    complete[part.number] = fetch(ref, self.rollouts.name_of(rank), self.rollouts.timeout)
                except WorkerLost as error:
                    self._waiting.appendleft(part)
                    self._replace(rank, str(error))
        return complete

    def _send(self) -> None:
        rows = [0] * len(self.rollouts.workers)
        for rank, part in self._running.values():
            rows[rank] += len(part.prompts)
        while self._waiting:
            rank = rows.index(min(rows))
            enough = rows[rank] + len(self._waiting[0].prompts) > self.rollouts.rows_of_an_engine
            if self.over_updates and self.rollouts.joins:  # during an update nobody is here to send more
                enough = [of for of, _ in self._running.values()].count(rank) >= _CALLS
            if rows[rank] and enough:
                return
            part = self._waiting.popleft()
            self._running[self.rollouts.workers[rank].generate.remote(part.prompts, *self.settings)] = rank, part
            rows[rank] += len(part.prompts)

    def _replace_silent(self) -> None:
        """Replace workers that do not answer. One that answers is only slow."""
        end = time.monotonic() + self.rollouts.timeout / 2
        ranks = sorted({rank for rank, _ in self._running.values()})
        for rank, ping in [(rank, self.rollouts.workers[rank].ping.remote()) for rank in ranks]:
            try:
                fetch(ping, self.rollouts.name_of(rank), max(0.0, end - time.monotonic()))
            except WorkerLost:
                self._replace(rank, f"no answer within {self.rollouts.timeout:g} s")

    def _replace(self, rank: int, reason: str) -> None:
        lost = [ref for ref, (of, _) in self._running.items() if of == rank]
        self._waiting.extendleft(reversed([self._running.pop(ref)[1] for ref in lost]))
        self.rollouts.replace(rank, reason)


def generate(rollouts: Rollouts, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int) -> DataProto:
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
