"""One POST of JSON, and again where a second attempt may succeed."""

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_WAIT = 60.0
_JITTER = random.SystemRandom()  # nobody's seeded generator


class RemoteError(RuntimeError):
    """The server has not answered, or not with JSON."""


def post(
    url: str,
    data: Mapping[str, Any],
    *,
    timeout: float,
    retries: int,
    backoff: float,
    headers: Mapping[str, str] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Any:
    """The answer, decoded. An attempt that finds no server, no time or a passing error (429, 5xx) is repeated after
    ``backoff`` seconds, then twice that, ..., give or take a half, or after what ``Retry-After`` says.

    Raises:
        RemoteError: after the last attempt, or at an error that will not pass (400, 404, ...).
    """
    body = json.dumps(data).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **(headers or {})})
    for attempt in range(retries + 1):
        wait = backoff * 2**attempt * _JITTER.uniform(0.5, 1.5)  # not all clients at once
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code}"
            if error.code not in _PASSING:
                break
            asked = error.headers.get("Retry-After", "")
            wait = float(asked) if asked.isdigit() else wait
        except ValueError as error:
            problem = f"no JSON: {error}"
            break
        except (OSError, http.client.HTTPException) as error:
            problem = str(error) or type(error).__name__
        if attempt < retries:
            sleep(min(wait, _LONGEST_WAIT))
    raise RemoteError(f"{url}: {problem}, after {attempt + 1} attempts")
