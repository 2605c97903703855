"""Scores from a server: see :func:`remote`."""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlprims.rewards._http import RemoteError, post
from rlprims.rewards._outcome import Failure, Outcome, read
from rlprims.rewards.scoring import Scores, to_rows, to_scores

__all__ = ["RemoteError", "remote"]


def remote(
    url: str,
    responses: Sequence[str],
    answers: Sequence[Any],
    extra: Mapping[str, Sequence[Any]] | None = None,
    *,
    rows_per_request: int = 16,
    concurrency: int = 8,
    requests_per_second: float | None = None,
    timeout: float = 60.0,
    retries: int = 4,
    backoff: float = 1.0,
    headers: Mapping[str, str] | None = None,
) -> Scores:
    """Score by an HTTP server. Requests that fail cost their rows only.

    A request is ``{"responses": [...], "answers": [...], ...}`` with every column of ``extra``; the answer is
    ``{"results": [...]}``, for each row a number, a mapping with ``score``, or null where it has none.

    Args:
        url: where to POST.
        responses: texts.
        answers: JSON values.
        extra: further columns, JSON values; all are sent.
        rows_per_request: rows.
        concurrency: requests at once.
        requests_per_second: started at most; None: as fast as they are answered.
        timeout: seconds of one attempt.
        retries: further attempts where one may succeed (no answer, 429, 5xx).
        backoff: seconds before the second attempt, doubled after each.
        headers: of each request, such as an authorization.

    Raises:
        ValueError: columns of different lengths; a setting that is not positive.
    """
    if min(rows_per_request, concurrency) < 1 or timeout <= 0 or (requests_per_second or 1.0) <= 0:
        raise ValueError("rows_per_request, concurrency, timeout and requests_per_second must be positive")
    names = ["answers", *(extra or {})]
    rows = to_rows(names[1:], responses, answers, extra)
    pace = _Pace(requests_per_second)

    def ask(part: Sequence[tuple[Any, ...]]) -> list[Outcome]:
        columns = dict(zip(["responses", *names], map(list, zip(*part, strict=True)), strict=True))
        try:
            pace.wait()
            answer = post(url, columns, timeout=timeout, retries=retries, backoff=backoff, headers=headers)
            results = answer["results"]
            if len(results) != len(part):
                return [Failure("wrong length", f"{len(results)} results for {len(part)} rows")] * len(part)
            return [read(result) for result in results]
        except RemoteError as error:
            return [Failure("no answer", str(error))] * len(part)
        except (TypeError, KeyError) as error:
            return [Failure("wrong answer", f"{type(error).__name__}: {error}")] * len(part)

    parts = [rows[at : at + rows_per_request] for at in range(0, len(rows), rows_per_request)]
    with ThreadPoolExecutor(concurrency) as threads:
        return to_scores([outcome for outcomes in threads.map(ask, parts) for outcome in outcomes])


class _Pace:
    """Lets callers through, so many a second, evenly."""

    def __init__(self, rate: float | None) -> None:
        self._gap = 0.0 if rate is None else 1 / rate
        self._next = time.monotonic()
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + self._gap
        time.sleep(max(0.0, turn - time.monotonic()))
