"""Rounds of episodes: a round samples the next turn of every active episode. New ones may begin when some end."""

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


Begun: TypeAlias = Sequence[tuple[Environment, int]]
"""Environments, and the numbers of their samples."""


def play_rounds(
    first: Begun,
    *,
    play: Callable[[Environment, Sample, int], Awaitable[Episode]],
    complete: Callable[[list[Request]], list[Completion]],
    ended: Callable[[list[Episode]], Begun],
) -> None:
    """Run rounds until no episode is active. Environments run in the event loop of a thread; this thread samples.

    A round is begun when every episode waits for its next turn or has ended. So what is sampled together, and which
    episodes are ``ended`` together, depends on the number of their turns and not on the order of the answers. Episodes
    that ``ended`` returns begin at once, and their first turns are in the same round.

    Raises:
        Exception: what ``complete`` or ``ended`` raised, or an episode; the others are ended.
    """
    loop, live, waiting, over = event_loop("environments"), 0, list[Request](), list[Episode | BaseException]()
    rounds: SimpleQueue[tuple[list[Request], list[Episode | BaseException]]] = SimpleQueue()
    tasks = set[asyncio.Task[None]]()

    def send_if_all_wait() -> None:
        if len(waiting) == live and (waiting or over):
            rounds.put((sorted(waiting, key=lambda request: request.sample_id), over.copy()))
            waiting.clear()
            over.clear()

    async def sample(prompt_ids: Sequence[int], sample_id: int, turn: int) -> Completion:
        waiting.append(Request(sample_id, turn, prompt_ids, loop.create_future()))
        answer = waiting[-1].future
        send_if_all_wait()
        return await answer

    async def one(environment: Environment, sample_id: int) -> None:
        nonlocal live
        try:
            over.append(await play(environment, sample, sample_id))
        except BaseException as error:
            over.append(error)
        finally:
            live -= 1
            send_if_all_wait()

    def begin(begun: Begun, asked: list[Request]) -> None:
        nonlocal live
        waiting.extend(asked)
        live += len(begun)
        for environment, sample_id in begun:
            task = loop.create_task(one(environment, sample_id))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def end_all() -> None:
        for task in tasks:
            task.cancel()

    failure: Exception | None = None
    if not first:
        return
    loop.call_soon_threadsafe(begin, first, [])
    try:
        while True:
            asked, done = rounds.get()
            errors = [each for each in done if isinstance(each, BaseException)]
            if failure is None and errors:
                raise errors[0]
            if failure is None:
                episodes = sorted((e for e in done if isinstance(e, Episode)), key=lambda e: e.sample_id)
                if episodes and (begun := ended(episodes)):
                    loop.call_soon_threadsafe(begin, begun, asked)
                    continue
            if not asked:
                break
            try:
                answers: list[Completion] | Exception = failure or complete(asked)
            except Exception as error:  # the execution's: every episode ends with it
                failure = answers = error
            loop.call_soon_threadsafe(_give, asked, answers)
        if failure is not None:
            raise failure
    finally:
        loop.call_soon_threadsafe(end_all)


def _give(asked: list[Request], answers: list[Completion] | Exception) -> None:
    for i, request in enumerate(asked):
        if request.future.done():
            continue
        if isinstance(answers, Exception):
            request.future.set_exception(answers)
        else:
            request.future.set_result(answers[i])
