"""Scores from an HTTP server."""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from rlprims.rewards._columns import Data, Wants, by_row, plain
from rlprims.rewards._http import RemoteError, client, send
from rlprims.rewards._outcome import Failure, Outcome, Scores, encoded, read, to_scores
from rlprims.rewards._rates import Rates
from rlprims.rewards._waiting import gather, wait_for

__all__ = ["RemoteError", "remote"]

_CAUSED_BY_ROWS = ("wrong answer", "wrong length", "HTTP 400", "HTTP 413", "HTTP 422")
_Ask: TypeAlias = Callable[[Any, Sequence[int]], Awaitable[Any]]


def remote(
    url: str,
    responses: Sequence[str],
    answers: Sequence[Any],
    extra: Mapping[str, Sequence[Any]] | None = None,
    *,
    rows_per_request: int = 16,
    concurrency: int = 8,
    requests_per_second: float | None = None,
    tokens_per_second: float | None = None,
    timeout: float = 60.0,
    deadline: float | None = 600.0,
    retries: int = 4,
    backoff: float = 1.0,
    largest_answer_mb: float = 64.0,
    headers: Mapping[str, str] | None = None,
) -> Scores:
    """Score by an HTTP server. If a request fails, only its rows have no score, and failures are counted by cause.

    A request is ``{"responses": [...], "answers": [...], ...}`` with every column of ``extra``; the answer is
    ``{"results": [...]}``, for each row a number, a mapping with ``score``, or null if it has no score.

    If the server refuses a request with several rows (HTTP 400, 413, 422), or its answer cannot be read, the rows are
    sent again one by one, so that only the row with the error has no score. Redirects are not followed: data and
    headers are sent to the host of ``url`` only.

    Args:
        url: where to POST, http or https; proxies of the environment are used.
        responses: texts.
        answers: JSON values; if a value is not JSON (a circular list), only its row fails.
        extra: further columns, JSON values; all are sent.
        rows_per_request: the number of rows in a request.
        concurrency: the number of requests at once.
        requests_per_second: the largest rate of requests; None: no limit.
        tokens_per_second: the largest rate of response tokens, counted as a quarter of their bytes; None: no limit.
        timeout: seconds of one attempt, from the connection to the last byte.
        deadline: seconds of the whole call, attempts and waits included; rows without an answer then have no score.
        retries: further attempts after temporary failures (no answer, 429, 5xx).
        backoff: seconds before the second attempt, doubled after each; a valid Retry-After overrides it.
        largest_answer_mb: the largest size of an answer.
        headers: headers of each request, such as an authorization.

    Raises:
        ValueError: columns of different lengths; a setting that is not positive.
    """
    positive = (rows_per_request, concurrency, timeout, deadline or 1.0, largest_answer_mb)
    if min(positive) <= 0 or any(rate is not None and rate <= 0 for rate in (requests_per_second, tokens_per_second)):
        raise ValueError("expected rows_per_request, concurrency, and limits of time, size and rate above 0")
    columns = by_row(Wants(("", ""), tuple(extra or {}), (), False), Data(responses, answers, extra), {})
    outcomes: dict[int, Outcome] = {}
    rows = {}
    for index, row in enumerate(columns):
        values = {**dict(zip(("responses", "answers"), row.arguments, strict=True)), **row.named}
        if isinstance(failure := encoded(values), Failure):
            outcomes[index] = failure
        else:
            rows[index] = values
    rates = Rates(requests_per_second, tokens_per_second)
    end = math.inf if deadline is None else time.monotonic() + deadline

    async def ask(connections: Any, part: Sequence[int]) -> Any:
        """The server's answer to a request with these rows, in their turn."""
        turn = rates.turn(responses[index] for index in part)
        await asyncio.sleep(max(0.0, min(turn, end - time.monotonic())))
        request = {name: [rows[index][name] for index in part] for name in rows[part[0]]}
        return await send(
            connections,
            url,
            json.dumps(request, default=plain).encode(),
            timeout=timeout,
            retries=retries,
            backoff=backoff,
            headers=headers,
            deadline=end,
            largest_answer=int(largest_answer_mb * 2**20),
        )

    order = list(rows)
    parts = [order[at : at + rows_per_request] for at in range(0, len(order), rows_per_request)]
    for part, found in zip(parts, wait_for(_ask_all(ask, parts, concurrency)), strict=True):
        outcomes.update(zip(part, found, strict=True))
    return to_scores([outcomes[index] for index in range(len(responses))])


async def _ask_all(ask: _Ask, parts: Sequence[Sequence[int]], concurrency: int) -> list[list[Outcome]]:
    async with client() as connections:
        return await gather((partial(_outcomes, partial(ask, connections), part) for part in parts), concurrency)


async def _outcomes(ask: Callable[[Sequence[int]], Awaitable[Any]], part: Sequence[int]) -> list[Outcome]:
    """The outcomes of the rows of a request, sent again one by one if one of them may have made it fail."""
    try:
        return _read(await ask(part), len(part))
    except RemoteError as error:
        if len(part) > 1 and error.cause in _CAUSED_BY_ROWS:
            return [outcome for index in part for outcome in await _outcomes(ask, [index])]
        return [Failure(error.cause, error.detail)] * len(part)


def _read(answer: Any, rows: int) -> list[Outcome]:
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list):
        keys = f"an object with {sorted(answer)}" if isinstance(answer, dict) else type(answer).__name__
        raise RemoteError("wrong answer", f'expected {{"results": [...]}}, got {keys}'[:500])
    if len(results) != rows:
        raise RemoteError("wrong length", f"{len(results)} results for {rows} rows")
    try:
        return read(results, rows)
    except RecursionError:
        raise RemoteError("wrong answer", "nested too deeply") from None
