"""Groups of episodes whose turns are sampled in rounds: the next turn of every active episode, in one call."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from rlprims._event_loop import event_loop
from rlprims.data_proto import DataProto
from rlprims.environments import Completion, Episode, Sampler
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

    With ``until_all_end`` the method ``take`` goes on until all groups have ended, otherwise until one has; groups that
    begin before the next call join the round. With ``as_one`` all groups get their rows together, with equal columns.
    """

    def __init__(
        self, runner: EpisodeRunner, sampling: Sampling, seed: int, *, until_all_end: bool, as_one: bool
    ) -> None:
        self.runner, self.until_all_end, self.as_one = runner, until_all_end, as_one
        self._rounds = Rounds(runner.episode, lambda turns: runner.complete(turns, sampling, seed))
        self._active: dict[int, tuple[Group, list[Episode]]] = {}
        """Groups with the episodes that have ended, by number."""

    def begin(self, group: Group) -> None:
        self._active[group.number] = group, []
        self._rounds.begin((group.example, sample_id) for sample_id in group.samples)

    def take(self) -> dict[int, DataProto]:
        ended = self._next_groups()
        while self.until_all_end and self._active:
            ended += self._next_groups()
        if self.as_one:
            return by_group(self._rows(sorted(ended, key=lambda each: each[0].number)))
        return {group.number: self._rows([(group, episodes)]) for group, episodes in ended}

    def _next_groups(self) -> list[tuple[Group, list[Episode]]]:
        """The groups that end next, in the order in which their last episodes end."""
        ended = list[tuple[Group, list[Episode]]]()
        while not ended:
            for episode in self._rounds.take():
                group, episodes = next(each for each in self._active.values() if episode.sample_id in each[0].samples)
                episodes.append(episode)
                if len(episodes) == len(group.samples):
                    ended.append(self._active.pop(group.number))
        return ended

    def _rows(self, ended: Sequence[tuple[Group, list[Episode]]]) -> DataProto:
        in_order = [sorted(episodes, key=lambda episode: episode.sample_id) for _, episodes in ended]
        return self.runner.rows([group for group, _ in ended], [episode for own in in_order for episode in own])

    def close(self) -> None:
        self._active.clear()
        self._rounds.close()


class Rounds:
    """Rounds of episodes. Environments run in the event loop of a thread; the thread that calls ``take`` samples.

    A round begins when every episode waits for its next turn or has ended. So the turns that are sampled together, and
    the episodes that :meth:`take` returns, do not depend on the time that environments take.
    """

    def __init__(
        self,
        play: Callable[[Example, int, Sampler], Awaitable[Episode]],
        complete: Callable[[Sequence[TurnPrompt]], list[Completion]],
    ) -> None:
        self.play, self.complete = play, complete
        self._loop = event_loop("environments")
        self._new: list[tuple[Example, int]] = []
        self._active: set[asyncio.Task[Episode | BaseException]] = set()
        self._ended: list[asyncio.Task[Episode | BaseException]] = []
        self._requests: list[Request] = []
        self._all_wait = asyncio.Event()

    def begin(self, episodes: Iterable[tuple[Example, int]]) -> None:
        """Begin episodes, each of an example and the number of a sample. Their first turns are in the next round."""
        self._new += episodes

    def take(self) -> list[Episode]:
        """Run rounds until an episode ends; returns those that end together. A sampler's error ends all episodes."""
        ended = list[Episode]()
        while not ended:
            answers = [] if self._new else self._sample()
            new, self._new = self._new, []
            ended = asyncio.run_coroutine_threadsafe(self._next_round(new, answers), self._loop).result()
        return sorted(ended, key=lambda episode: episode.sample_id)

    def close(self) -> None:
        """Cancel the episodes that have not ended."""
        for task in list(self._active):
            self._loop.call_soon_threadsafe(task.cancel)

    def _sample(self) -> Sequence[Completion | Exception]:
        self._requests.sort(key=lambda request: request.prompt.sample_id)
        try:
            return self.complete([request.prompt for request in self._requests])
        except Exception as error:
            return [error] * len(self._requests)

    # In the event loop:

    async def _next_round(
        self, new: Sequence[tuple[Example, int]], answers: Sequence[Completion | Exception]
    ) -> list[Episode]:
        """Answer all requests or begin new episodes; wait until each episode waits or has ended. Those are returned."""
        self._all_wait.clear()
        if answers:
            requests, self._requests = self._requests, []
            for request, answer in zip(requests, answers, strict=True):
                answer_request(request, answer)
        for example, sample_id in new:
            task = self._loop.create_task(self._play(example, sample_id))
            task.add_done_callback(self._end)
            self._active.add(task)
        await self._all_wait.wait()
        ended, self._ended = [task.result() for task in self._ended], []
        if errors := [each for each in ended if isinstance(each, BaseException)]:
            raise errors[0]
        return [each for each in ended if isinstance(each, Episode)]

    async def _play(self, example: Example, sample_id: int) -> Episode | BaseException:
        try:
            return await self.play(example, sample_id, self._turn)
        except BaseException as error:
            return error

    def _end(self, task: "asyncio.Task[Episode | BaseException]") -> None:
        self._active.remove(task)
        self._ended.append(task)
        self._check()

    async def _turn(self, prompt_ids: Sequence[int], sample_id: int, turn: int) -> Completion:
        self._requests.append(Request(TurnPrompt(sample_id, turn, prompt_ids), self._loop.create_future()))
        answer = self._requests[-1].future
        self._check()
        return await answer

    def _check(self) -> None:
        if len(self._requests) == len(self._active):
            self._all_wait.set()


def answer_request(request: Request, answer: Completion | BaseException) -> None:
    """Answer a request, unless its episode was aborted. Called in the event loop of the environments."""
    if request.future.done():
        return
    if isinstance(answer, BaseException):
        request.future.set_exception(answer)
    else:
        request.future.set_result(answer)
