"""Groups of episodes that continue while the policy is updated."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from rlprims._event_loop import event_loop
from rlprims.data_proto import DataProto
from rlprims.environments import Completion, Episode
from rlprims.execution import Stream
from rlprims.trainer.sources.episodes import EpisodeRunner, TurnPrompt, completions_of, turn_rows
from rlprims.trainer.sources.group import Group
from rlprims.trainer.sources.rounds import Request, answer_request

_SECONDS = 0.02
"""Seconds to wait for completions before new requests of episodes are read."""


class ContinuousEpisodes:
    """A source of groups of episodes. Each turn is one part of a stream, which has its own thread.

    Environments run in the event loop of another thread. A turn begins when its environment has answered.
    """

    def __init__(self, runner: EpisodeRunner, open_stream: Callable[[], Stream]) -> None:
        self.runner = runner
        self.loop = event_loop("environments")
        self._playing: dict[Future[list[Episode]], Group] = {}
        self._turns = _TurnSampler(open_stream)

    def begin(self, group: Group) -> None:
        self._playing[asyncio.run_coroutine_threadsafe(self._play(group), self.loop)] = group

    async def _play(self, group: Group) -> list[Episode]:
        sample = self._turns.sample
        return await asyncio.gather(*(self.runner.episode(group.example, each, sample) for each in group.samples))

    def take(self) -> dict[int, DataProto]:
        done, _ = wait(self._playing, return_when=FIRST_COMPLETED)
        complete = [(self._playing.pop(future), future.result()) for future in done]
        return {group.number: self.runner.rows([group], episodes) for group, episodes in complete}

    def close(self) -> None:
        for future in self._playing:
            future.cancel()
        self._playing.clear()
        self._turns.close()


class _TurnSampler:
    """Samples the turns of episodes by one stream of an execution, in a thread."""

    def __init__(self, open_stream: Callable[[], Stream]) -> None:
        self._open = open_stream
        self._asked: SimpleQueue[Request] = SimpleQueue()
        self._closed = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="rlprims turns", daemon=True)
        self._thread.start()

    async def sample(self, prompt_ids: Sequence[int], sample_id: int, turn: int, *images: Any) -> Completion:
        """Sample one turn of an episode. Called in the event loop of the environments."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._asked.put(Request(TurnPrompt(sample_id, turn, prompt_ids, *images), answer))
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
                        running[stream.submit(turn_rows([request.prompt]))] = request
                    answers = stream.take(timeout=_SECONDS) if running else {}
                    for part, rows in answers.items():
                        _answer(running.pop(part), completions_of(rows)[0])
        except BaseException as error:
            self._failure = error
            for request in [*running.values(), *self._requests(timeout=0.0)]:
                _answer(request, error)

    def _requests(self, *, timeout: float) -> list[Request]:
        """Return all waiting requests. If there are none, wait for the next one for at most ``timeout`` seconds."""
        found: list[Request] = []
        with suppress(Empty):
            found.append(self._asked.get(timeout=timeout))
            while True:
                found.append(self._asked.get_nowait())
        return found


def _answer(request: Request, answer: Completion | BaseException) -> None:
    """Answer a request in the thread of its event loop."""
    request.future.get_loop().call_soon_threadsafe(answer_request, request, answer)
