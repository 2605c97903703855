"""Programs of a model on a SandboxFusion server (github.com/bytedance/SandboxFusion), not on this machine.

In a run, with the path of this file::

    verifier:
      fn: rlprims.rewards.verifiers.code_stdin
      run: {fn: examples/sandbox_fusion.py:run_cases, url: "http://host:8080/run_code"}

The server must be as isolated as its operator says: this file only asks it.
"""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2

from rlprims.rewards.sandbox import CaseResult

# Reads the arguments before the program runs, and marks the last line, the result, with a random text.
_CALLER = """
import sys
from json import dumps, loads
arguments = loads(sys.stdin.read())
sys.setrecursionlimit(10_000)
program = {{"__name__": "program"}}
exec(compile({program!r}, "program.py", "exec"), program)
function = program.get({function!r}) or getattr(program["Solution"](), {function!r})
result = dumps(function(*arguments))
sys.__stdout__.write("\\n{mark}" + result + "\\n")
"""


class RemoteError(RuntimeError):
    """The server did not answer, or its sandbox has failed. A run counts failures by ``cause``."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


def run_cases(
    program: str,
    inputs: Sequence[Any],
    *,
    url: str,
    function: str | None,
    seconds: float,
    total_seconds: float,
    memory_mb: int,
    retries: int = 3,
) -> Iterator[CaseResult]:
    """The result of the program for each input: a text of stdin, or JSON arguments of its ``function``.

    ``seconds`` holds for compiling and for running. No case starts after ``total_seconds``.

    Raises:
        RemoteError: no answer after all attempts, or the server reports that its sandbox has failed.
    """
    limits = {"compile_timeout": seconds, "run_timeout": seconds, "memory_limit_MB": memory_mb}
    request = {"code": program, "language": "python", **limits, "files": {}, "fetch_files": []}
    mark = secrets.token_hex(16)
    if function is not None:
        request["code"] = _CALLER.format(program=program, function=function, mark=mark)
    end = time.monotonic() + total_seconds
    with httpx2.Client(timeout=2 * seconds + 10) as client:
        for given in inputs:
            if time.monotonic() > end:
                return
            stdin = given if function is None else json.dumps(given)
            answer = _posted(client, url, {**request, "stdin": stdin}, retries)
            result = _read(url, answer)
            yield result if function is None else _returned(result, mark)


def _posted(client: httpx2.Client, url: str, request: dict[str, Any], retries: int) -> Any:
    """The server's answer. If there is none, or 429 or 5xx, the request is sent again after 1, 2, 4, ... seconds."""
    for attempt in range(retries + 1):
        try:
            reply = client.post(url, json=request)
            reply.raise_for_status()
            return reply.json()
        except httpx2.HTTPStatusError as error:
            status = error.response.status_code
            cause, passing = f"HTTP {status}", status == 429 or status >= 500
            detail = error.response.text[:300]
        except httpx2.TransportError as error:
            cause, passing, detail = "no answer", True, f"{type(error).__name__}: {error}"
        except ValueError as error:
            cause, passing, detail = "wrong answer", False, f"no JSON: {error}"
        if attempt == retries or not passing:
            break
        time.sleep(2.0**attempt)
    raise RemoteError(cause, f"{url}: {detail}, after {attempt + 1} attempts")


def _read(url: str, answer: Any) -> CaseResult:
    if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
        message = answer.get("message") if isinstance(answer, dict) else answer
        raise RemoteError("wrong answer", f"{url}: the sandbox has failed: {str(message)[:300]}")
    last = answer.get("run_result") or answer.get("compile_result") or {}
    status = "timeout" if last.get("status") == "TimeLimitExceeded" else "finished"
    return CaseResult(status, last.get("return_code"), last.get("stdout") or "")


def _returned(result: CaseResult, mark: str) -> CaseResult:
    """The value behind the mark. A program that ends well without it, as by ``os._exit(0)``, has failed."""
    _, found, last = result.output.rpartition(mark)
    try:
        if found:
            return result._replace(output=json.loads(last))
    except (ValueError, RecursionError):
        pass
    return result._replace(code=result.code or 1, output=None)
