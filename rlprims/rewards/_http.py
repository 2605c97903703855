"""POST requests of JSON with retries and a deadline. Redirects are not followed."""

import http.client
import io
import json
import math
import random
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import Any, cast

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_WAIT = 60.0
_JITTER = random.SystemRandom()  # not a generator that a seed controls
_PIECE = 1 << 16
_LONGEST_REASON = 300  # bytes


class RemoteError(RuntimeError):
    """The server did not answer, or its answer is not JSON. Failures are counted by ``cause``."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


def post(
    url: str,
    data: Mapping[str, Any] | bytes,
    *,
    timeout: float,
    retries: int,
    backoff: float,
    headers: Mapping[str, str] | None = None,
    deadline: float = math.inf,
    largest_answer: int = 64 * 2**20,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """Send a request and return the decoded JSON answer.

    If there is no connection, a timeout or a temporary error (429, 5xx), the request is repeated after ``backoff``
    seconds, then twice that, ..., with 50 % jitter, or after the time in ``Retry-After``.

    An attempt has ``timeout`` seconds in total, from the connection to the last byte. No attempt starts after
    ``deadline``, on the clock ``time.monotonic``. A redirect is an error, so that data, headers and credentials are
    sent to the host of ``url`` only.

    Raises:
        RemoteError: after the last attempt, or at a permanent error (400, 404, a certificate, no JSON).
    """
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    if not url.startswith(("http://", "https://")):
        raise RemoteError("wrong request", f"expected an address with http:// or https://, got {url!r}")
    error = RemoteError("no answer in time", f"{url}: the deadline was over before the first attempt")
    for attempt in range(retries + 1):
        left = min(timeout, deadline - time.monotonic())
        if left <= 0:
            break
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})})
            with _opener().open(request, timeout=left) as response:
                return _decoded(response, largest_answer)
        except Exception as problem:
            cause, passing = _cause(problem)
            error = RemoteError(cause, f"{url}: {_described(problem)}, after {attempt + 1} attempts")
            if not passing:
                break
            retry_after = problem.headers.get("Retry-After", "") if isinstance(problem, urllib.error.HTTPError) else ""
            wait = _seconds(retry_after)
            if wait is None:
                wait = backoff * 2**attempt * _JITTER.uniform(0.5, 1.5)  # so that clients do not retry at the same time
        if attempt < retries:
            sleep(max(0.0, min(wait, _LONGEST_WAIT, deadline - time.monotonic())))
    raise error


class _WrongAnswer(Exception):
    """The answer does not have the expected form."""


def _decoded(response: Any, largest: int) -> Any:
    parts, size = [], 0
    while part := response.read(_PIECE):
        size += len(part)
        if size > largest:
            raise _WrongAnswer(f"the answer is longer than {largest} bytes")
        parts.append(part)
    if getattr(response, "length", None):  # the answer is shorter than its Content-Length
        raise http.client.IncompleteRead(b"", response.length)
    try:
        return json.loads(b"".join(parts))
    except RecursionError:
        raise _WrongAnswer("no JSON: nested too deeply") from None
    except ValueError as error:
        raise _WrongAnswer(f"no JSON: {error}") from None


def _cause(problem: Exception) -> tuple[str, bool]:
    """The cause for the counts, and whether a second attempt may succeed."""
    if isinstance(problem, _WrongAnswer):
        return "wrong answer", False
    if isinstance(problem, urllib.error.HTTPError):
        return f"HTTP {problem.code}", problem.code in _PASSING
    reason = problem.reason if isinstance(problem, urllib.error.URLError) else problem
    if isinstance(reason, TimeoutError):
        return "no answer in time", True
    if isinstance(reason, ssl.SSLError):
        return "TLS error", not isinstance(reason, ssl.SSLCertVerificationError)
    if isinstance(reason, ConnectionRefusedError):
        return "connection refused", True
    if isinstance(reason, ConnectionError | http.client.RemoteDisconnected | http.client.IncompleteRead):
        return "connection reset", True
    if isinstance(reason, OSError):
        return "no connection", True
    if isinstance(reason, http.client.HTTPException):
        return "wrong answer", True
    return "wrong request", False  # an address or a header that cannot be sent


def _described(problem: Exception) -> str:
    if isinstance(problem, urllib.error.HTTPError):
        if 300 <= problem.code < 400:
            return f"HTTP {problem.code}: redirects are not followed"
        with problem, suppress(OSError, http.client.HTTPException):
            return f"HTTP {problem.code}: {problem.read(_LONGEST_REASON).decode(errors='replace')}"
        return f"HTTP {problem.code}"
    reason = problem.reason if isinstance(problem, urllib.error.URLError) else problem
    return str(reason) or type(reason).__name__


def _seconds(retry_after: str) -> float | None:
    """The wait in seconds of a Retry-After header, a number or a date; None if it cannot be parsed."""
    if re.fullmatch(r"[0-9]{1,9}", retry_after.strip()):
        return float(retry_after)
    try:
        at = parsedate_to_datetime(retry_after)
        return max(0.0, (at - datetime.now(UTC if at.tzinfo else None)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


class _Timed(io.RawIOBase):
    """Reads a socket until a deadline. Each read has the remaining time; a socket's timeout is per read."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, deadline: float) -> None:
        self._raw, self._connection, self._deadline = raw, connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out while the answer came")
        self._connection.settimeout(left)
        return cast(int | None, self._raw.readinto(buffer))

    def close(self) -> None:
        self._raw.close()
        super().close()


def _response(connection: socket.socket, *args: Any, deadline: float, **options: Any) -> http.client.HTTPResponse:
    response = http.client.HTTPResponse(connection, *args, **options)
    response.fp = io.BufferedReader(_Timed(response.fp.detach(), connection, deadline))
    return response


class _HTTP(http.client.HTTPConnection):
    def __init__(self, host: str, *, timeout: float) -> None:
        super().__init__(host, timeout=timeout)
        self.response_class = partial(_response, deadline=time.monotonic() + timeout)  # type: ignore[assignment]


class _HTTPS(http.client.HTTPSConnection):
    def __init__(self, host: str, *, timeout: float, context: ssl.SSLContext) -> None:
        super().__init__(host, timeout=timeout, context=context)
        self.response_class = partial(_response, deadline=time.monotonic() + timeout)  # type: ignore[assignment]


class _HTTPHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_HTTP, request)  # type: ignore[arg-type]


class _HTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_HTTPS, request, context=_trusted())  # type: ignore[arg-type]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


@cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_HTTPHandler, _HTTPSHandler, _NoRedirect)


@cache
def _trusted() -> ssl.SSLContext:
    """The machine's certificates, read once."""
    return ssl.create_default_context()
