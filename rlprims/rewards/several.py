"""Several reward functions at once, each with its own weight, column and failures."""

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rlprims._event_loop import event_loop
from rlprims.grouping import rows_by_label
from rlprims.masking import check_choice
from rlprims.rewards._outcome import Failure, Outcome, Wants, raised, read, wants
from rlprims.rewards._pace import Pace, tokens
from rlprims.rewards._scores import combine
from rlprims.rewards.scoring import Scores, read_all, to_columns, to_rows, to_scores

__all__ = ["Reward", "Several", "several"]

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
    """The rows of one call; ``scores``: it takes (responses, answers, columns) and returns :class:`Scores`, like a
    ``Pool``."""
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
    def _paced(self) -> bool:
        return (self.requests_per_minute or self.tokens_per_minute) is not None

    @property
    def waits(self) -> bool:
        """Whether other functions can run at the same time."""
        return self.is_async or self.per == "scores" or self.concurrency is not None


class Several(NamedTuple):
    """The scores of B responses by several functions."""

    scores: Tensor
    """float32 (B,), Σ weight · score; NaN if a function with a weight failed, or no function applies."""
    columns: dict[str, Tensor]
    """float32 (B,) each: ``NAME``, and ``NAME/OTHER`` for the other numbers of that function."""
    failures: list[list[Failure]]
    """The failures of each row; a cause begins with the name of the function."""
    parts: dict[str, Scores]
    """The scores of each function."""


def several(
    rewards: Sequence[Reward],
    responses: Sequence[str],
    answers: Sequence[Any],
    extra: Mapping[str, Sequence[Any]] | None = None,
    *,
    group_ids: Sequence[Any] | None = None,
) -> Several:
    """Call every function on every row. Functions that wait (async, in threads, pools, servers) run concurrently.

    Args:
        rewards: the functions.
        responses: texts.
        answers: one per row, of any type that the functions accept.
        extra: further columns of the data.
        group_ids: the group of each row, for functions of groups.

    Raises:
        ValueError: two functions with one name; columns of different lengths; a required column is missing; no
            ``group_ids`` for a function of groups.

    >>> def correct(response, answer):
    ...     return float(response == answer)
    >>> async def short(response, *, max_length=3):
    ...     return float(len(response) <= max_length)
    >>> scored = several([Reward(correct), Reward(short, 0.5)], ["72", "seven"], ["72", "7"])
    >>> scored.scores, scored.columns["short"]
    (tensor([1.5000, 0.0000]), tensor([1., 0.]))
    """
    names = [reward.column for reward in rewards]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"expected reward functions of different names, got {names}; give each a name")
    data = _Data(responses, answers, extra or {}, group_ids)
    parts: dict[str, Scores] = {}
    with ExitStack() as ends:
        started = {reward.column: _start(reward, data, ends) for reward in rewards if reward.waits}
        for reward in rewards:
            if not reward.waits:
                parts[reward.column] = _score_in_turn(reward, data)
        parts |= {name: finish() for name, finish in started.items()}
    parts = {name: parts[name] for name in names}
    skipping = {reward.column for reward in rewards if reward.skips}
    failures: list[list[Failure]] = [[] for _ in responses]
    failed = torch.zeros(len(responses), dtype=torch.bool)
    for reward in rewards:
        for row, failure in enumerate(parts[reward.column].failures):
            if failure is not None and not (reward.column in skipping and failure.cause == "returned None"):
                failures[row].append(Failure(f"{reward.column} {failure.cause}", failure.detail))
                failed[row] |= reward.weight != 0
    weighted = [reward for reward in rewards if reward.weight] or list(rewards)
    scores = combine(
        torch.stack([parts[reward.column].scores for reward in weighted], 1),
        weights=tuple(float(reward.weight) for reward in weighted),
    )
    columns = {name: part.scores for name, part in parts.items()}
    columns |= {f"{name}/{other}": x for name, part in parts.items() for other, x in part.columns.items()}
    return Several(torch.where(failed, torch.nan, scores), columns, failures, parts)


class _Data(NamedTuple):
    responses: Sequence[str]
    answers: Sequence[Any]
    extra: Mapping[str, Sequence[Any]]
    group_ids: Sequence[Any] | None


class _Call(NamedTuple):
    """One call of a function, and the rows that it scores."""

    rows: list[int]
    arguments: Sequence[Any]
    named: dict[str, Any]


def _calls(reward: Reward, data: _Data) -> list[_Call]:
    wanted: Wants = wants(reward.fn)
    if reward.per == "answer":
        rows = to_rows(wanted, data.responses, data.answers, data.extra)
        return [_Call([i], row.arguments, row.named) for i, row in enumerate(rows)]
    arguments, named = to_columns(wanted, data.responses, data.answers, data.extra)
    if reward.per == "batch":
        groups = [list(range(len(data.responses)))] if data.responses else []
    elif data.group_ids is None or len(data.group_ids) != len(data.responses):
        raise ValueError(f"{reward.column} is per group: give group_ids, one for each response")
    else:
        groups = rows_by_label(data.group_ids)
    return [
        _Call(
            rows,
            [[column[row] for row in rows] for column in arguments],
            {name: [column[row] for row in rows] for name, column in named.items()},
        )
        for rows in groups
    ]


def _outcomes(reward: Reward, call: _Call, result: Any) -> list[Outcome]:
    return [read(result)] if reward.per == "answer" else read_all(result, len(call.rows))


def _once(reward: Reward, call: _Call) -> list[Outcome]:
    try:
        if reward._paced:
            time.sleep(_turn(reward, call))
        return _outcomes(reward, call, reward.fn(*call.arguments, **{**call.named, **reward.options}))
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        return [raised(error)] * len(call.rows)


async def _once_async(reward: Reward, call: _Call, slots: asyncio.Semaphore) -> list[Outcome]:
    async with slots:
        if reward._paced:
            await asyncio.sleep(_turn(reward, call))
        limit = asyncio.timeout(reward.seconds)
        try:
            async with limit:
                result = await reward.fn(*call.arguments, **{**call.named, **reward.options})
            return _outcomes(reward, call, result)
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            timed_out = isinstance(error, TimeoutError) and limit.expired()
            failure = Failure("timeout", f"took more than {reward.seconds:g} s") if timed_out else raised(error)
            return [failure] * len(call.rows)


def _score_in_turn(reward: Reward, data: _Data) -> Scores:
    calls = _calls(reward, data)
    return _in_order_of_rows(calls, [_once(reward, call) for call in calls], data)


def _start(reward: Reward, data: _Data, ends: ExitStack) -> Callable[[], Scores]:
    """Start the calls, and return a function that waits for them. At an interrupt ``ends`` cancels waiting calls."""
    if reward.is_async:
        calls = _calls(reward, data)

        async def run_all() -> list[list[Outcome]]:
            slots = asyncio.Semaphore(reward.concurrency or 64)
            return list(await asyncio.gather(*(_once_async(reward, call, slots) for call in calls)))

        future = asyncio.run_coroutine_threadsafe(run_all(), event_loop("rewards"))
        ends.callback(future.cancel)
        return lambda: _in_order_of_rows(calls, future.result(), data)
    threads = ThreadPoolExecutor(reward.concurrency or 1)
    ends.callback(threads.shutdown, wait=False, cancel_futures=True)
    if reward.per == "scores":
        scored: Future[Scores] = threads.submit(reward.fn, data.responses, data.answers, data.extra, **reward.options)
        return scored.result
    calls = _calls(reward, data)
    futures = [threads.submit(_once, reward, call) for call in calls]
    return lambda: _in_order_of_rows(calls, [future.result() for future in futures], data)


def _in_order_of_rows(calls: Sequence[_Call], results: Sequence[Sequence[Outcome]], data: _Data) -> Scores:
    by_row = {
        row: outcome
        for call, outcomes in zip(calls, results, strict=True)
        for row, outcome in zip(call.rows, outcomes, strict=True)
    }
    return to_scores([by_row[row] for row in range(len(data.responses))])


def _turn(reward: Reward, call: _Call) -> float:
    by_call, by_token = _paces(reward.fn, reward.requests_per_minute, reward.tokens_per_minute)
    texts = [call.arguments[0]] if reward.per == "answer" else call.arguments[0]
    return max(by_call.turn(), by_token.turn(tokens(*texts)))


@cache
def _paces(fn: Callable[..., Any], per_minute: float | None, tokens_per_minute: float | None) -> tuple[Pace, Pace]:
    """The paces of calls and of tokens for a function with these limits; all steps share them."""
    return Pace(per_minute and per_minute / 60), Pace(tokens_per_minute and tokens_per_minute / 60)
