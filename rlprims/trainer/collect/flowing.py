"""Sample groups of responses or episodes while the policy is updated."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import Empty, SimpleQueue
from typing import Protocol

from rlprims._event_loop import event_loop
from rlprims.data_proto import DataProto
from rlprims.environments import Completion, Episode
from rlprims.execution import Execution, Sampling, Stream
from rlprims.runs.metrics import Clock
from rlprims.trainer.collect.collector import Collector
from rlprims.trainer.collect.episodes import Group, Player
from rlprims.trainer.collect.rounds import Request, give

_SECONDS = 0.02
"""Seconds to wait for completions before new requests of episodes are read."""


class Groups(Protocol):
    """The interface of a source of groups. Groups begin at any time, and are completed in any order."""

    def begin(self, group: Group) -> None: ...

    def take(self, clock: Clock) -> dict[int, DataProto]:
        """Wait until a group is complete; returns the scored rows of all complete groups, by group number."""
        ...

    def close(self) -> None:
        """Abort the groups that are not complete."""
        ...


def groups_of(collector: Collector) -> Groups:
    """Return the source of groups for a run: responses, or episodes if the run has an environment."""
    if collector.player is None:
        return Responses(collector)
    return Episodes(collector, collector.player) if collector.execution.overlaps else WholeEpisodes(collector)


class Responses:
    """Groups of responses. Each group is one part of a stream. Groups that end together are scored together."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.stream = collector.open_stream(over_updates=True)
        self._numbers: dict[int, int] = {}  # the numbers of groups, by the numbers of their parts

    def begin(self, group: Group) -> None:
        self._numbers[self.stream.submit(self.collector.prompts_of(group))] = group.number

    def take(self, clock: Clock) -> dict[int, DataProto]:
        with clock("generate"):
            answers = self.stream.take()
        with clock("score"):
            scored = self.collector.scored(answers)
        return {self._numbers.pop(part): rows for part, rows in scored.items()}

    def close(self) -> None:
        self.stream.__exit__(None, None, None)


class WholeEpisodes:
    """Groups of episodes, for an execution that cannot sample during an update.

    When a group is needed, all groups that have begun are played to their ends.
    """

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self._begun: list[Group] = []

    def begin(self, group: Group) -> None:
        self._begun.append(group)

    def take(self, clock: Clock) -> dict[int, DataProto]:
        complete: dict[int, DataProto] = {}

        def admit(group: Group, rows: DataProto, episodes: list[Episode]) -> list[Group]:
            self.collector.count_causes(episodes)
            complete[group.number] = rows
            return []

        begun, self._begun = self._begun, []
        config, player = self.collector.config, self.collector.player
        assert player is not None
        with clock("generate"):
            player.stream(begun, config.sampling, seed=config.seed, admit=admit)
        return complete

    def close(self) -> None:
        self._begun.clear()


class Episodes:
    """Groups of episodes that continue during updates. Each turn is one part of a stream, which has its own thread.

    Environments run in the event loop of another thread. A turn begins when its environment has answered. It does not
    wait for other episodes or for the trainer.
    """

    def __init__(self, collector: Collector, player: Player) -> None:
        self.collector, self.player = collector, player
        self.loop = event_loop("environments")
        self._playing: dict[Future[list[Episode]], Group] = {}
        config = collector.config
        self._turns = Turns(player, collector.execution, config.sampling, config.seed)

    def begin(self, group: Group) -> None:
        self._playing[asyncio.run_coroutine_threadsafe(self._play(group), self.loop)] = group

    async def _play(self, group: Group) -> list[Episode]:
        return await asyncio.gather(
            *(self.player.play_one(group.example, sample_id, self._turns.sample) for sample_id in group.samples)
        )

    def take(self, clock: Clock) -> dict[int, DataProto]:
        with clock("generate"):
            done, _ = wait(self._playing, return_when=FIRST_COMPLETED)
        complete: dict[int, DataProto] = {}
        for future in done:
            group, episodes = self._playing.pop(future), future.result()
            self.collector.count_causes(episodes)
            complete[group.number] = self.player.rows_of([group], episodes)
        return complete

    def close(self) -> None:
        for future in self._playing:
            future.cancel()
        self._playing.clear()
        self._turns.close()


class Turns:
    """Samples the turns of episodes by one stream of an execution, in a thread."""

    def __init__(self, player: Player, execution: Execution, sampling: Sampling, seed: int) -> None:
        self.player = player
        self._open: Callable[[], Stream] = lambda: execution.stream(
            sampling, seed=seed, prompt_width=None, over_updates=True
        )
        self._asked: SimpleQueue[Request] = SimpleQueue()
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="rlprims turns", daemon=True)
        self._thread.start()

    async def sample(self, prompt_ids: Sequence[int], sample_id: int, turn: int) -> Completion:
        """Sample one turn of an episode. Called in the event loop of the environments."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._asked.put(Request(sample_id, turn, prompt_ids, answer))
        if self._failure is not None:  # the thread sets it before it answers the waiting requests
            raise self._failure
        return await answer

    def close(self) -> None:
        """Abort the turns that are being sampled."""
        self._closed.set()
        self._thread.join()

    def _serve(self) -> None:
        """Run the stream in the thread. If it fails, all requests get its error."""
        running: dict[int, Request] = {}
        try:
            with self._open() as stream:
                while not self._closed.is_set():
                    for request in self._requests(timeout=0.0 if running else _SECONDS):
                        running[stream.submit(self.player.prompts_of([request]))] = request
                    answers = stream.take(timeout=_SECONDS) if running else {}
                    for part, rows in answers.items():
                        _give(running.pop(part), self.player.completions_of(rows)[0])
        except BaseException as error:
            self._failure = error
            for request in [*running.values(), *self._requests(timeout=0.0)]:
                _give(request, error)

    def _requests(self, *, timeout: float) -> list[Request]:
        """Return all waiting requests. If there are none, wait for the next one for at most ``timeout`` seconds."""
        found: list[Request] = []
        try:
            found.append(self._asked.get(timeout=timeout) if timeout else self._asked.get_nowait())
            while True:
                found.append(self._asked.get_nowait())
        except Empty:
            return found


def _give(request: Request, answer: Completion | BaseException) -> None:
    """Answer a request in the thread of its event loop."""
    request.future.get_loop().call_soon_threadsafe(give, request, answer)
