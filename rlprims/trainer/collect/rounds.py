"""Rounds of episodes. A round samples the next turn of every active episode; new episodes may begin between rounds."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

from rlprims._event_loop import event_loop
from rlprims.environments import Completion, Environment, Episode, Sample


class Request(NamedTuple):
    """A turn that an episode waits for."""

    sample_id: int
    turn: int
    prompt_ids: Sequence[int]
    future: "asyncio.Future[Completion]"


NewEpisodes: TypeAlias = Sequence[tuple[Environment, int]]
"""Environments of episodes that begin, and the numbers of their samples."""


def play_rounds(
    first: NewEpisodes,
    *,
    play: Callable[[Environment, Sample, int], Awaitable[Episode]],
    complete: Callable[[list[Request]], list[Completion]],
    ended: Callable[[list[Episode]], NewEpisodes],
) -> None:
    """Run rounds until no episode is active. Environments run in the event loop of a thread; this thread samples.

    A round begins when every episode waits for its next turn or has ended. So the turns that are sampled together, and
    the episodes that ``ended`` is called with, do not depend on the time that environments take. Episodes that
    ``ended`` returns begin at once; their first turns are in the same round.

    Raises:
        Exception: ``complete``, ``ended`` or an episode raised it. The other episodes are cancelled.
    """
    loop, active, waiting, finished = event_loop("environments"), 0, list[Request](), list[Episode | BaseException]()
    rounds: SimpleQueue[tuple[list[Request], list[Episode | BaseException]]] = SimpleQueue()
    tasks = set[asyncio.Task[None]]()

    def send_if_all_wait() -> None:
        if len(waiting) == active and (waiting or finished):
            rounds.put((sorted(waiting, key=lambda request: request.sample_id), finished.copy()))
            waiting.clear()
            finished.clear()

    async def sample(prompt_ids: Sequence[int], sample_id: int, turn: int) -> Completion:
        waiting.append(Request(sample_id, turn, prompt_ids, loop.create_future()))
        answer = waiting[-1].future
        send_if_all_wait()
        return await answer

    async def play_one(environment: Environment, sample_id: int) -> None:
        nonlocal active
        try:
            finished.append(await play(environment, sample, sample_id))
        except BaseException as error:
            finished.append(error)
        finally:
            active -= 1
            send_if_all_wait()

    def begin(new: NewEpisodes, requests: list[Request]) -> None:
        nonlocal active
        waiting.extend(requests)
        active += len(new)
        for environment, sample_id in new:
            task = loop.create_task(play_one(environment, sample_id))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def cancel_all() -> None:
        for task in tasks:
            task.cancel()

    failure: Exception | None = None
    if not first:
        return
    loop.call_soon_threadsafe(begin, first, [])
    try:
        while True:
            requests, done = rounds.get()
            errors = [each for each in done if isinstance(each, BaseException)]
            if failure is None and errors:
                raise errors[0]
            if failure is None:
                episodes = sorted((e for e in done if isinstance(e, Episode)), key=lambda e: e.sample_id)
                if episodes and (new := ended(episodes)):
                    loop.call_soon_threadsafe(begin, new, requests)
                    continue
            if not requests:
                break
            try:
                answers: list[Completion] | Exception = failure or complete(requests)
            except Exception as error:  # of the execution: it ends every episode
                failure = answers = error
            loop.call_soon_threadsafe(_answer, requests, answers)
        if failure is not None:
            raise failure
    finally:
        loop.call_soon_threadsafe(cancel_all)


def _answer(requests: list[Request], answers: list[Completion] | Exception) -> None:
    for i, request in enumerate(requests):
        give(request, answers if isinstance(answers, Exception) else answers[i])


def give(request: Request, answer: Completion | BaseException) -> None:
    """Answer a request, unless its episode was aborted. Called in the event loop of the environments."""
    if request.future.done():
        return
    if isinstance(answer, BaseException):
        request.future.set_exception(answer)
    else:
        request.future.set_result(answer)
