"""POST requests of JSON with retries and a deadline, to the host of the address only: redirects are not followed."""

import asyncio
import json
import math
import random
import re
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any

from rlprims._extras import hint
from rlprims.rewards._waiting import wait_for

if TYPE_CHECKING:
    import httpx2

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_WAIT = 60.0
_JITTER = random.SystemRandom()  # not a generator that a seed controls
_LONGEST_REASON = 300  # bytes


class RemoteError(RuntimeError):
    """The server did not answer, or its answer is not JSON. Failures are counted by ``cause``."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


def post(url: str, data: Mapping[str, Any], **settings: Any) -> Any:
    """Send one request. The settings, the result and the errors are those of :func:`send`."""

    async def send_one() -> Any:
        async with client() as connections:
            return await send(connections, url, json.dumps(data).encode(), **settings)

    return wait_for(send_one())


@asynccontextmanager
async def client() -> AsyncIterator["httpx2.AsyncClient"]:
    """Connections to servers, by the proxies of the environment. They have no limits of their own and keep no cookies.

    Raises:
        ImportError: httpx2 is not installed.
    """
    try:
        import anyio
        import httpx2
    except ImportError as error:
        raise ImportError(f"rewards by HTTP need httpx2 ({error}): {hint('rewards')}") from None
    await anyio.sleep(0)  # loads the rest of anyio, so that the first request does not delay the turns of the others
    async with httpx2.AsyncClient(
        verify=_trusted(),
        follow_redirects=False,
        timeout=None,
        limits=httpx2.Limits(max_connections=None),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
    ) as connections:
        yield connections


async def send(
    connections: "httpx2.AsyncClient",
    url: str,
    body: bytes,
    *,
    timeout: float,
    retries: int,
    backoff: float,
    headers: Mapping[str, str] | None = None,
    deadline: float = math.inf,
    largest_answer: int = 64 * 2**20,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> Any:
    """Send a request and return the decoded JSON answer.

    If there is no connection, a timeout or a temporary error (429, 5xx), the request is repeated after ``backoff``
    seconds, then twice that, ..., with 50 % jitter, or after the time in ``Retry-After``. An attempt has ``timeout``
    seconds, from the connection to the last byte. None starts after ``deadline``, on the clock ``time.monotonic``.

    Raises:
        RemoteError: after the last attempt, or at a permanent error (400, 404, a certificate, no JSON).
    """
    if not url.startswith(("http://", "https://")):
        raise RemoteError("wrong request", f"expected an address with http:// or https://, got {url!r}")
    # Without an encoding an answer in memory is not larger than the bytes that are read.
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})}
    error = RemoteError("no answer in time", f"{url}: the deadline was over before the first attempt")
    for attempt in range(retries + 1):
        left = min(timeout, deadline - time.monotonic())
        if left <= 0:
            break
        try:
            async with asyncio.timeout(left), connections.stream("POST", url, content=body, headers=headers) as answer:
                return await _decoded(answer, largest_answer)
        except Exception as problem:
            cause, passing = _cause(problem)
            detail = str(problem) or type(problem).__name__
            error = RemoteError(cause, f"{url}: {detail}, after {attempt + 1} attempts")
            if not passing:
                break
            wait = problem.retry_after if isinstance(problem, _Refused) else None
            if wait is None:
                wait = backoff * 2**attempt * _JITTER.uniform(0.5, 1.5)  # so that clients do not retry at the same time
        if attempt < retries:
            await sleep(max(0.0, min(wait, _LONGEST_WAIT, deadline - time.monotonic())))
    raise error


class _Refused(Exception):
    """The answer cannot be used: by its status, or its content."""

    def __init__(self, cause: str, detail: str, passing: bool = False, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.cause, self.passing, self.retry_after = cause, passing, retry_after


async def _decoded(answer: "httpx2.Response", largest: int) -> Any:
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
    import httpx2

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
