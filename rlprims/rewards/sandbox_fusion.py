"""A client of SandboxFusion servers (github.com/bytedance/SandboxFusion): :func:`run`, :func:`call`."""

import secrets
from collections.abc import Sequence
from importlib import resources
from typing import Any

from rlprims.rewards._http import RemoteError, post
from rlprims.rewards.sandbox import CaseResult, Result, _values

__all__ = ["call", "run"]

# Reads the arguments before the program runs, and marks the last line, the result, with a random text.
_CALLER = """
if True:
    import sys
    arguments = loads(sys.stdin.read())
    sys.setrecursionlimit(10_000)
    program = {{"__name__": "program"}}
    exec(compile({program!r}, "program.py", "exec"), program)
    function = program.get({function!r}) or getattr(program["Solution"](), {function!r})
    result = dumps(function(*arguments))
    sys.__stdout__.write("\\n{mark}" + result + "\\n")
"""


def run(
    url: str,
    program: str,
    *,
    stdin: str = "",
    language: str = "python",
    seconds: float = 10.0,
    memory_mb: int = 1024,
    retries: int = 3,
    backoff: float = 1.0,
) -> Result:
    """Run a program on the server; the result is that of :func:`rlprims.rewards.sandbox.run` with isolation ``server``.

    ``url`` is the whole address, ``http://host:8080/run_code``. ``seconds`` holds for compiling and for running.

    Raises:
        RemoteError: no answer after all attempts, or the server reports that its sandbox has failed.
    """
    request = {
        "code": program,
        "stdin": stdin,
        "language": language,
        "compile_timeout": seconds,
        "run_timeout": seconds,
        "memory_limit_MB": memory_mb,
        "files": {},
        "fetch_files": [],
    }
    answer = post(url, request, timeout=2 * seconds + 10, retries=retries, backoff=backoff)
    if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
        message = answer.get("message") if isinstance(answer, dict) else answer
        raise RemoteError("wrong answer", f"{url}: the sandbox has failed: {str(message)[:500]}")
    last = answer.get("run_result") or answer.get("compile_result") or {}
    status = "timeout" if last.get("status") == "TimeLimitExceeded" else "finished"
    stdout, stderr = last.get("stdout") or "", last.get("stderr") or ""
    return Result(status, last.get("return_code"), stdout, stderr, "server")


def call(
    url: str,
    program: str,
    function: str,
    arguments: Sequence[Any],
    *,
    seconds: float = 10.0,
    memory_mb: int = 1024,
    retries: int = 3,
    backoff: float = 1.0,
) -> CaseResult:
    """Run a program on the server and call its function, or the method of its class ``Solution``, with plain data.

    Raises:
        RemoteError: as :func:`run`.
    """
    mark = secrets.token_hex(16)
    source = resources.files("rlprims.rewards.sandbox").joinpath("_values.py").read_text(encoding="utf-8")
    text = source + _CALLER.format(program=program, function=function, mark=mark)
    stdin = _values.dumps(list(arguments))
    result = run(url, text, stdin=stdin, seconds=seconds, memory_mb=memory_mb, retries=retries, backoff=backoff)
    _, found, last = result.stdout.rpartition(mark)
    try:
        value = _values.loads(last) if found else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found = ""
    if result.status == "finished" and result.code == 0 and not found:
        return CaseResult("finished", 1, None)
    return CaseResult(result.status, result.code, value if found else None)
