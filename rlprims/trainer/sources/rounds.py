"""Groups of episodes whose turns are sampled in rounds: the next turn of every active episode, in one call."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

from rlprims._event_loop import event_loop
from rlprims.data_proto import DataProto
from rlprims.environments import Completion, Episode, Sample
from rlprims.execution import Sampling
from rlprims.trainer.data import Example
from rlprims.trainer.scoring.columns import by_group
from rlprims.trainer.sources.episodes import EpisodeRunner, TurnPrompt
from rlprims.trainer.sources.group import Group


class Request(NamedTuple):
    """A turn that an episode waits for."""

    prompt: TurnPrompt
    future: "asyncio.Future[Completion]"


class EpisodeRounds:
    """A source of groups of episodes.

    Args:
        runner: runs the episodes.
        sampling: how their turns are sampled.
        seed: of the samples.
        until_all_end: ``take`` goes on until all groups have ended; otherwise until one has. Groups that begin before
            the next call join the round.
        as_one: all groups get their rows together: the same widths, and the columns that any of them has.
    """

    def __init__(
        self, runner: EpisodeRunner, sampling: Sampling, seed: int, *, until_all_end: bool, as_one: bool
    ) -> None:
        self.runner, self.until_all_end, self.as_one = runner, until_all_end, as_one
        self._rounds = Rounds(runner.episode, lambda turns: runner.complete(turns, sampling, seed))
        self._active: dict[int, Group] = {}
        self._ended: dict[int, list[Episode]] = {}

    def begin(self, group: Group) -> None:
        self._active[group.number] = group
        self._rounds.begin([(group.example, sample_id) for sample_id in group.samples])

    def take(self) -> dict[int, DataProto]:
        ended = self._next_groups()
        while self.until_all_end and self._active:
            ended |= self._next_groups()
        if not self.as_one:
            return {number: self.runner.rows([group], episodes) for number, (group, episodes) in ended.items()}
        in_order = [ended[number] for number in sorted(ended)]
        groups, episodes = [group for group, _ in in_order], [each for _, own in in_order for each in own]
        return by_group(self.runner.rows(groups, episodes))

    def _next_groups(self) -> dict[int, tuple[Group, list[Episode]]]:
        """The groups that end next, with their episodes, by number; in the order in which their last ones end."""
        complete: dict[int, tuple[Group, list[Episode]]] = {}
        while not complete:
            for episode in self._rounds.take():
                group = next(group for group in self._active.values() if episode.sample_id in group.samples)
                episodes = self._ended.setdefault(group.number, [])
                episodes.append(episode)
                if len(episodes) == len(group.samples):
                    del self._active[group.number], self._ended[group.number]
                    complete[group.number] = group, sorted(episodes, key=lambda each: each.sample_id)
        return complete

    def close(self) -> None:
        self._active.clear()
        self._ended.clear()
        self._rounds.close()


_Round: TypeAlias = tuple[list[Request], list[Episode | BaseException]]


class Rounds:
    """Rounds of episodes. Environments run in the event loop of a thread; the thread that calls ``take`` samples.

    A round begins when every episode waits for its next turn or has ended. So the turns that are sampled together, and
    the episodes that :meth:`take` returns, do not depend on the time that environments take.
    """

    def __init__(
        self,
        play: Callable[[Example, int, Sample], Awaitable[Episode]],
        complete: Callable[[Sequence[TurnPrompt]], list[Completion]],
    ) -> None:
        self.play, self.complete = play, complete
        self._loop = event_loop("environments")
        self._new: list[tuple[Example, int]] = []
        self._requests: list[Request] = []  # the turns of the next round
        self._rounds: SimpleQueue[_Round] = SimpleQueue()
        # These are used in the event loop only.
        self._active = 0
        self._waiting: list[Request] = []
        self._finished: list[Episode | BaseException] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, episodes: Sequence[tuple[Example, int]]) -> None:
        """Begin episodes, each of an example and the number of a sample. Their first turns are in the next round."""
        self._new += episodes

    def take(self) -> list[Episode]:
        """Run rounds until an episode ends; returns those that end together, in the order of their samples.

        Raises:
            Exception: the sampler or an episode raised it. If it is the sampler's, all episodes have ended by it.
        """
        while True:
            if self._new:
                self._loop.call_soon_threadsafe(self._start, self._new, self._requests)
                self._new = []
            else:
                self._sample()
            self._requests, ended = self._rounds.get()
            if errors := [each for each in ended if isinstance(each, BaseException)]:
                raise errors[0]
            if ended:
                return sorted((each for each in ended if isinstance(each, Episode)), key=lambda each: each.sample_id)

    def close(self) -> None:
        """Cancel the episodes that have not ended."""
        self._loop.call_soon_threadsafe(self._cancel_all)

    def _sample(self) -> None:
        try:
            answers = self.complete([request.prompt for request in self._requests])
        except Exception as error:
            while self._requests:
                self._answer([error] * len(self._requests))
                self._requests, _ = self._rounds.get()
            raise
        self._answer(answers)

    def _answer(self, answers: Sequence[Completion | Exception]) -> None:
        self._loop.call_soon_threadsafe(_answer_all, self._requests, answers)

    # In the event loop:

    def _cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _start(self, new: Sequence[tuple[Example, int]], requests: Sequence[Request]) -> None:
        self._waiting += requests
        self._active += len(new)
        for example, sample_id in new:
            task = self._loop.create_task(self._play(example, sample_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _play(self, example: Example, sample_id: int) -> None:
        ended: Episode | BaseException
        try:
            ended = await self.play(example, sample_id, self._turn)
        except BaseException as error:
            ended = error
        self._finished.append(ended)
        self._active -= 1
        self._send_if_all_wait()

    async def _turn(self, prompt_ids: Sequence[int], sample_id: int, turn: int) -> Completion:
        request = Request(TurnPrompt(sample_id, turn, prompt_ids), self._loop.create_future())
        self._waiting.append(request)
        self._send_if_all_wait()
        return await request.future

    def _send_if_all_wait(self) -> None:
        if len(self._waiting) == self._active and (self._waiting or self._finished):
            requests = sorted(self._waiting, key=lambda request: request.prompt.sample_id)
            self._rounds.put((requests, self._finished))
            self._waiting, self._finished = [], []


def _answer_all(requests: Sequence[Request], answers: Sequence[Completion | Exception]) -> None:
    for request, answer in zip(requests, answers, strict=True):
        answer_request(request, answer)


def answer_request(request: Request, answer: Completion | BaseException) -> None:
    """Answer a request, unless its episode was aborted. Called in the event loop of the environments."""
    if request.future.done():
        return
    if isinstance(answer, BaseException):
        request.future.set_exception(answer)
    else:
        request.future.set_result(answer)
