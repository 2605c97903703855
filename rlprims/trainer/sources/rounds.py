"""Groups of episodes whose turns are sampled in rounds: the next turn of every active episode, in one call."""

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from rlprims._event_loop import event_loop
from rlprims.data_proto import DataProto
from rlprims.environments import Completion, Episode
from rlprims.execution import Sampling
from rlprims.trainer.scoring.columns import by_group
from rlprims.trainer.sources.episodes import EpisodeRunner, TurnPrompt
from rlprims.trainer.sources.group import Group


class Request(NamedTuple):
    """A turn that an episode waits for."""

    prompt: TurnPrompt
    future: "asyncio.Future[Completion]"


class Played(NamedTuple):
    """A group with those of its episodes that have ended."""

    group: Group
    episodes: list[Episode]


class EpisodeRounds:
    """A source of groups of episodes.

    Environments run in the event loop of a thread; the thread that calls ``take`` samples. A round begins when every
    episode waits for its next turn or has ended. So the turns that are sampled together, and the groups that end
    together, do not depend on the time that environments take.

    With ``until_all_end`` the method ``take`` goes on until all groups have ended, otherwise until one has; groups that
    begin before the next call join the round. With ``as_one`` all groups get their rows together, with equal columns.
    """

    def __init__(
        self, runner: EpisodeRunner, sampling: Sampling, seed: int, *, until_all_end: bool, as_one: bool
    ) -> None:
        self.runner, self.until_all_end, self.as_one = runner, until_all_end, as_one
        self._complete = partial(runner.complete, sampling=sampling, seed=seed)
        self._loop = event_loop("environments")
        self._new: list[Played] = []
        self._playing: dict[int, Played] = {}
        """By the numbers of the groups."""
        self._active: set[asyncio.Task[None]] = set()
        """The episodes that have not ended."""
        self._errors: list[BaseException] = []
        self._requests: list[Request] = []
        self._all_wait = asyncio.Event()

    def begin(self, group: Group) -> None:
        """Begin the episodes of a group. Their first turns are in the next round."""
        self._playing[group.number] = Played(group, [])
        self._new.append(self._playing[group.number])

    def take(self) -> dict[int, DataProto]:
        ended = self.play()
        while self.until_all_end and self._playing:
            ended += self.play()
        if self.as_one:
            return by_group(self._rows(sorted(ended, key=lambda each: each.group.number)))
        return {each.group.number: self._rows([each]) for each in ended}

    def play(self) -> list[Played]:
        """Run rounds until a group ends; returns those that end together. A sampler's error ends all episodes."""
        ended = list[Played]()
        while not ended:
            answers = [] if self._new else self._sample()
            new, self._new = self._new, []
            asyncio.run_coroutine_threadsafe(self._next_round(new, answers), self._loop).result()
            if self._errors:
                raise self._errors[0]
            ended = [each for each in self._playing.values() if len(each.episodes) == len(each.group.samples)]
        for each in ended:
            del self._playing[each.group.number]
            each.episodes.sort(key=lambda episode: episode.sample_id)
        return ended

    def close(self) -> None:
        """Cancel the episodes that have not ended."""
        self._playing.clear()
        for task in list(self._active):
            self._loop.call_soon_threadsafe(task.cancel)

    def _rows(self, ended: Sequence[Played]) -> DataProto:
        groups, episodes = zip(*ended, strict=True)
        return self.runner.rows(groups, list(chain.from_iterable(episodes)))

    def _sample(self) -> Sequence[Completion | Exception]:
        self._requests.sort(key=lambda request: request.prompt.sample_id)
        try:
            return self._complete([request.prompt for request in self._requests])
        except Exception as error:
            return [error] * len(self._requests)

    # In the event loop:

    async def _next_round(self, new: Sequence[Played], answers: Sequence[Completion | Exception]) -> None:
        """Answer all requests or begin new episodes; wait until each episode waits or has ended."""
        self._all_wait.clear()
        if answers:
            requests, self._requests = self._requests, []
            for request, answer in zip(requests, answers, strict=True):
                answer_request(request, answer)
        begun = [(each, sample_id) for each in new for sample_id in each.group.samples]
        self._active |= {self._loop.create_task(self._play(*one)) for one in begun}
        await self._all_wait.wait()

    async def _play(self, of: Played, sample_id: int) -> None:
        try:
            of.episodes.append(await self.runner.episode(of.group.example, sample_id, self._turn))
        except BaseException as error:
            self._errors.append(error)
        self._active -= {asyncio.current_task()}
        self._check()

    async def _turn(self, prompt_ids: Sequence[int], sample_id: int, turn: int, *images: Any) -> Completion:
        self._requests.append(Request(TurnPrompt(sample_id, turn, prompt_ids, *images), self._loop.create_future()))
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
