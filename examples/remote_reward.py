"""Scores from an HTTP server: it gets several responses in a request, and answers with a score for each.

In a run, with the path of this file::

    rewards:
      - fn: {fn: examples/remote_reward.py:remote, server: {url: "http://scorer:8000/score", key: SCORER_KEY}}
        per: batch
        name: style

A request is ``{"responses": [...], "answers": [...], ...}`` with every column of the data; the answer is
``{"results": [...]}``, for each row a number, a mapping with ``score``, or null if it has no score.
"""

import asyncio
import json
import math
import os
import random
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_CAUSED_BY_ROWS = ("wrong answer", "wrong length", "HTTP 400", "HTTP 413", "HTTP 422")
_LONGEST_WAIT = 60.0
_LONGEST_REASON = 300  # bytes
_JITTER = random.SystemRandom()  # not a generator that a seed controls


class RemoteError(RuntimeError):
    """The server did not answer, or its answer is not JSON. A run counts failures by ``cause``."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


@dataclass(frozen=True)
class Server:
    """A server and the limits of requests to it.

    Raises:
        ValueError: a limit that is not above 0.
    """

    url: str
    """Where to POST, http or https; proxies of the environment are used."""
    key: str | None = None
    """The environment variable with the key, sent as a bearer token."""
    rows_per_request: int = 16
    concurrency: int = 8
    """The number of requests at once."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """The largest rate of response tokens, counted as a quarter of their bytes."""
    timeout: float = 60.0
    """Seconds of one attempt, from the connection to the last byte."""
    deadline: float = 600.0
    """Seconds of a batch, attempts and waits included; rows without an answer then have no score."""
    retries: int = 4
    """Further attempts after temporary failures (no answer, 429, 5xx)."""
    backoff: float = 1.0
    """Seconds before the second attempt, doubled after each; a valid Retry-After overrides it."""
    largest_answer_mb: float = 64.0

    def __post_init__(self) -> None:
        limits = (self.rows_per_request, self.concurrency, self.timeout, self.deadline, self.largest_answer_mb)
        rates = [rate for rate in (self.requests_per_minute, self.tokens_per_minute) if rate is not None]
        if min(*limits, *rates) <= 0 or self.retries < 0:
            raise ValueError(f"expected limits above 0 and retries of 0 or more, got {self}")


async def remote(
    responses: Sequence[str], answers: Sequence[Any], *, server: Server, **columns: Sequence[Any]
) -> list[Any]:
    """The result of each row; an exception where it has none.

    If the server refuses a request with several rows (HTTP 400, 413, 422), or its answer cannot be read, the rows are
    sent again one by one, so that only the row with the error has no score. Redirects are not followed: data and
    headers are sent to the host of ``url`` only.

    Args:
        server: the server and its limits.
        responses: texts.
        answers: JSON values; if a value is not JSON (a circular list), only its row fails.
        columns: further columns, JSON values; all are sent.
    """
    names = ("responses", "answers", *columns)
    found = [_encoded(row) for row in zip(responses, answers, *columns.values(), strict=True)]
    order = [index for index, values in enumerate(found) if not isinstance(values, RemoteError)]
    parts = [order[at : at + server.rows_per_request] for at in range(0, len(order), server.rows_per_request)]
    slots, end = asyncio.Semaphore(server.concurrency), time.monotonic() + server.deadline

    async def ask(client: httpx2.AsyncClient, part: Sequence[int]) -> list[Any]:
        """The results of a part. Its rows are sent again one by one if one of them may have made it fail."""
        turn = _turn(server, [responses[index] for index in part])
        await asyncio.sleep(max(0.0, min(turn, end - time.monotonic())))
        values = [", ".join(column) for column in zip(*(found[index] for index in part), strict=True)]
        body = "{" + ", ".join(f"{json.dumps(n)}: [{v}]" for n, v in zip(names, values, strict=True)) + "}"
        try:
            return _results(await post(client, server, body.encode(), end=end), len(part))
        except RemoteError as error:
            if len(part) > 1 and error.cause in _CAUSED_BY_ROWS:
                return [result for index in part for result in await ask(client, [index])]
            return [error] * len(part)

    async def ask_in_slot(client: httpx2.AsyncClient, part: Sequence[int]) -> None:
        async with slots:
            for index, result in zip(part, await ask(client, part), strict=True):
                found[index] = result

    async with _client(server) as client, asyncio.TaskGroup() as tasks:
        for part in parts:
            tasks.create_task(ask_in_slot(client, part))
    return found


async def post(
    client: httpx2.AsyncClient,
    server: Server,
    body: bytes,
    *,
    end: float = math.inf,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> Any:
    """Send a request and return the decoded JSON answer. No attempt starts after ``end``, by ``time.monotonic``.

    Waits between attempts have 50 % jitter, so that clients do not retry at the same time.

    Raises:
        RemoteError: after the last attempt, or at a permanent error (400, 404, a certificate, no JSON).
    """
    error = RemoteError("no answer in time", f"{server.url}: the deadline was over before the first attempt")
    for attempt in range(server.retries + 1):
        left = min(server.timeout, end - time.monotonic())
        if left <= 0:
            break
        try:
            async with asyncio.timeout(left), client.stream("POST", server.url, content=body) as answer:
                return await _decoded(answer, int(server.largest_answer_mb * 2**20))
        except Exception as problem:
            cause, passing = _cause(problem)
            detail = str(problem) or type(problem).__name__
            error = RemoteError(cause, f"{server.url}: {detail}, after {attempt + 1} attempts")
            if not passing:
                break
            wait = problem.retry_after if isinstance(problem, _Refused) else None
            if wait is None:
                wait = server.backoff * 2**attempt * _JITTER.uniform(0.5, 1.5)
        if attempt < server.retries:
            await sleep(max(0.0, min(wait, _LONGEST_WAIT, end - time.monotonic())))
    raise error


def _client(server: Server) -> httpx2.AsyncClient:
    """Connections with no limits of their own, that keep no cookies and follow no redirects.

    Raises:
        ValueError: the environment variable of the key is not set.
    """
    # Without an encoding an answer in memory is not larger than the bytes that are read.
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if server.key is not None:
        if server.key not in os.environ:
            raise ValueError(f"the environment variable {server.key} is not set, expected the server's key in it")
        headers["Authorization"] = f"Bearer {os.environ[server.key]}"
    return httpx2.AsyncClient(
        headers=headers,
        verify=_trusted(),
        timeout=None,
        limits=httpx2.Limits(max_connections=None),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
    )


def _encoded(row: Sequence[Any]) -> Any:
    """The values of a row as JSON. Numbers and arrays of numpy and torch become values of JSON."""
    try:
        return [json.dumps(value, default=lambda x: x.tolist()) for value in row]
    except (TypeError, ValueError, RecursionError, AttributeError) as error:
        return RemoteError("not JSON", str(error))


def _results(answer: Any, rows: int) -> list[Any]:
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list):
        keys = f"an object with {sorted(answer)}" if isinstance(answer, dict) else type(answer).__name__
        raise RemoteError("wrong answer", f'expected {{"results": [...]}}, got {keys}'[:500])
    if len(results) != rows:
        raise RemoteError("wrong length", f"{len(results)} results for {rows} rows")
    return results


_NEXT: dict[Server, list[float]] = {}
"""When the next request to a server may start: by its rate of requests, and by that of tokens."""


def _turn(server: Server, texts: Sequence[str]) -> float:
    """Reserve the next turn within the rates, and return the seconds until it."""
    tokens = sum(len(text.encode(errors="replace")) for text in texts) // 4 + 1
    now = time.monotonic()
    turns = [max(begin, now) for begin in _NEXT.get(server, [now, now])]
    rates = server.requests_per_minute or math.inf, server.tokens_per_minute or math.inf
    _NEXT[server] = [turns[0] + 60 / rates[0], turns[1] + 60 * tokens / rates[1]]
    return max(turns) - now


class _Refused(Exception):
    """The answer cannot be used: by its status, or its content."""

    def __init__(self, cause: str, detail: str, passing: bool = False, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.cause, self.passing, self.retry_after = cause, passing, retry_after


async def _decoded(answer: httpx2.Response, largest: int) -> Any:
    if not answer.is_success:
        status, reason = answer.status_code, "redirects are not followed"
        if not 300 <= status < 400:
            reason = (await anext(answer.aiter_raw(_LONGEST_REASON), b"")).decode(errors="replace")
        retry_after = _seconds(answer.headers.get("Retry-After", ""))
        raise _Refused(f"HTTP {status}", f"HTTP {status}: {reason}", status in _PASSING, retry_after)
    body = bytearray()
    async for part in answer.aiter_raw():
        body += part
        if len(body) > largest:
            raise _Refused("wrong answer", f"the answer is longer than {largest} bytes")
    try:
        return json.loads(body)
    except RecursionError:
        raise _Refused("wrong answer", "no JSON: nested too deeply") from None
    except ValueError as error:
        raise _Refused("wrong answer", f"no JSON: {error}") from None


def _cause(problem: Exception) -> tuple[str, bool]:
    """The cause for the counts, and whether a second attempt may succeed."""
    if isinstance(problem, _Refused):
        return problem.cause, problem.passing
    if isinstance(problem, TimeoutError):
        return "no answer in time", True
    below = list(_below(problem))
    if any(isinstance(error, ssl.SSLError) for error in below):
        return "TLS error", not any(isinstance(error, ssl.SSLCertVerificationError) for error in below)
    if any(isinstance(error, ConnectionRefusedError) for error in below):
        return "connection refused", True
    if isinstance(problem, httpx2.RemoteProtocolError):  # the connection was closed, or the answer is not HTTP
        is_closed = any(words in str(problem) for words in ("disconnected", "closed connection"))
        return "connection reset" if is_closed else "wrong answer", True
    if isinstance(problem, httpx2.ConnectError | httpx2.ProxyError):
        return "no connection", True
    if isinstance(problem, httpx2.NetworkError):
        return "connection reset", True
    return "wrong request", False  # an address or a header that cannot be sent


def _below(problem: BaseException | None) -> Iterator[BaseException]:
    """The exception and those that it was raised from: the libraries wrap the system's."""
    while problem is not None:
        yield problem
        if isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        else:
            problem = problem.__cause__ or problem.__context__


def _seconds(retry_after: str) -> float | None:
    """The wait in seconds of a Retry-After header, a number or a date; None if it cannot be parsed."""
    if re.fullmatch(r"[0-9]{1,9}", retry_after.strip()):
        return float(retry_after)
    try:
        at = parsedate_to_datetime(retry_after)
        return max(0.0, (at - datetime.now(UTC if at.tzinfo else None)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


@cache
def _trusted() -> ssl.SSLContext:
    """The machine's certificates, read once."""
    return ssl.create_default_context()
