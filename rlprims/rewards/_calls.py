"""Calls of reward functions, in this thread, in other threads or in an event loop, within limits of number and rate."""

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, TypeAlias

from rlprims.grouping import rows_by_label
from rlprims.masking import check_choice
from rlprims.rewards._columns import Bound, Data, by_row, by_rows, wants
from rlprims.rewards._outcome import Failure, Outcome, Scores, outcomes, raised, read, to_scores
from rlprims.rewards._rates import Rates
from rlprims.rewards._waiting import IO, gather, in_thread, start

Per: TypeAlias = Literal["answer", "group", "batch", "scores"]


@dataclass(frozen=True)
class Reward:
    """A reward function and the settings of its calls.

    A function of one response is ``(response, answer, further columns by name, *, options)``; with ``per`` group or
    batch it takes lists and returns a list. The parameter for the answer may be missing. A column for a parameter with
    a default may be missing too, and ``**kwargs`` gets all other columns. The function may be ``async``.

    Raises:
        ValueError: wrong settings.
    """

    fn: Callable[..., Any]
    weight: float = 1.0
    """The weight of its score in the sum; 0: it is only logged."""
    name: str = ""
    """The name of its column; empty: the name of the function."""
    per: Per = "answer"
    """The rows of one call; ``scores``: (responses, answers, columns) give :class:`Scores`, as in a ``Pool``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The arguments after ``*``."""
    concurrency: int | None = None
    """Calls at once, in threads unless it is async; None: 64 if async, else one by one in this thread."""
    seconds: float | None = None
    """The time limit of one call of an async function; None: no limit."""
    requests_per_minute: float | None = None
    """The largest rate of calls; they start at equal distances."""
    tokens_per_minute: float | None = None
    """The largest rate of response tokens in these calls, counted as a quarter of their bytes."""
    skips: bool = False
    """Whether the result None means that the function does not apply to the row: it is then left out of the sum."""

    def __post_init__(self) -> None:
        check_choice("per", self.per, Per)
        for name in ("concurrency", "seconds", "requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"expected {name} above 0, got {value}; use None for no limit")
        if self.seconds is not None and not self.is_async:
            raise ValueError(f"{self.column} has seconds, expected an async function; use a Pool for other functions")

    @property
    def column(self) -> str:
        return self.name or getattr(self.fn, "__name__", type(self.fn).__name__)

    @property
    def is_async(self) -> bool:
        return any(inspect.iscoroutinefunction(f) for f in (self.fn, getattr(self.fn, "__call__", None)))  # noqa: B004

    @property
    def waits(self) -> bool:
        """Whether other functions can run at the same time."""
        return self.is_async or self.per == "scores" or self.concurrency is not None


def run(rewards: Sequence[Reward], data: Data) -> list[Scores]:
    """The scores by each function. Functions that wait run at the same time, while the others run in this thread."""
    started: dict[int, Future[Scores]] = {}
    try:
        for number, reward in enumerate(rewards):
            if reward.waits:
                bound = [] if reward.per == "scores" else _bind(reward, data)
                started[number] = start(_waiting(reward, bound, data), "rewards" if reward.is_async else IO)
        scores = {number: _in_turn(reward, data) for number, reward in enumerate(rewards) if not reward.waits}
        scores |= {number: future.result() for number, future in started.items()}
    finally:  # after an interrupt nothing goes on
        for future in started.values():
            future.cancel()
    return [scores[number] for number in range(len(rewards))]


def _in_turn(reward: Reward, data: Data) -> Scores:
    """The scores of a function that is called in this thread."""
    calls, found = _bind(reward, data), list[Outcome]()
    for bound in calls:
        if (seconds := _turn(reward, bound)) > 0:
            time.sleep(seconds)
        found += outcomes(reward.fn, bound.arguments, bound.named, bound.results)
    return _scores(reward, calls, found)


async def _waiting(reward: Reward, calls: Sequence[Bound], data: Data) -> Scores:
    """The scores of a function that is called in threads or in this event loop."""
    if reward.per == "scores":
        return await in_thread(partial(reward.fn, data.responses, data.answers, data.extra or {}, **reward.options))
    at_once = reward.concurrency or (64 if reward.is_async else 1)
    found = await gather((partial(_call, reward, bound) for bound in calls), at_once)
    return _scores(reward, calls, [outcome for of_call in found for outcome in of_call])


async def _call(reward: Reward, bound: Bound) -> list[Outcome]:
    if (seconds := _turn(reward, bound)) > 0:
        await asyncio.sleep(seconds)
    if not reward.is_async:
        return await in_thread(partial(outcomes, reward.fn, bound.arguments, bound.named, bound.results))
    limit = asyncio.timeout(reward.seconds)
    try:
        async with limit:
            result = await reward.fn(*bound.arguments, **bound.named)
        return read(result, bound.results)
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        timed_out = isinstance(error, TimeoutError) and limit.expired()
        failure = Failure("timeout", f"took more than {reward.seconds:g} s") if timed_out else raised(error)
        return [failure] * len(bound.rows)


def _bind(reward: Reward, data: Data) -> list[Bound]:
    """The arguments of each call.

    Raises:
        ValueError: columns of different lengths; a required column is missing; no group ids for a call of groups.
    """
    wanted, rows = wants(reward.fn), len(data.responses)
    if reward.per == "answer":
        return by_row(wanted, data, reward.options)
    if reward.per == "batch":
        return by_rows(wanted, data, [range(rows)] if rows else [], reward.options)
    if data.group_ids is None or len(data.group_ids) != rows:
        raise ValueError(f"{reward.column} is per group: give group_ids, one for each response")
    return by_rows(wanted, data, rows_by_label(data.group_ids), reward.options)


def _scores(reward: Reward, calls: Sequence[Bound], found: Sequence[Outcome]) -> Scores:
    """The outcomes of the calls, one after the other, as scores in the order of the rows."""
    if reward.per == "group":
        rows = [row for bound in calls for row in bound.rows]
        found = [found[place] for place in sorted(range(len(rows)), key=rows.__getitem__)]
    return to_scores(found)


def _turn(reward: Reward, bound: Bound) -> float:
    """Reserve the next turn within the rates, and return the seconds until it."""
    if reward.requests_per_minute is None and reward.tokens_per_minute is None:
        return 0.0
    rates = _rates(reward.fn, reward.requests_per_minute, reward.tokens_per_minute)
    return rates.turn(bound.arguments[0] if bound.results is not None else [bound.arguments[0]])


@cache
def _rates(fn: Callable[..., Any], per_minute: float | None, tokens_per_minute: float | None) -> Rates:
    """The rates of a function with these limits; all steps share them."""
    return Rates(per_minute and per_minute / 60, tokens_per_minute and tokens_per_minute / 60)
