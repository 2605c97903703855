"""A client of SandboxFusion (github.com/bytedance/SandboxFusion), for those who have the server: see :func:`run`."""

from rlprims.rewards._http import RemoteError, post
from rlprims.rewards.sandbox import Result

__all__ = ["RemoteError", "run"]


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
    """Run a program there; the result is as :func:`rlprims.rewards.sandbox.run`'s, with isolation ``server``.

    ``url`` is the whole address, ``http://host:8080/run_code``. ``seconds`` holds for compiling and for running.

    Raises:
        RemoteError: no answer after all attempts, or the server says that its sandbox has failed: then nobody knows how
            good the program is.
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
        raise RemoteError(f"{url}: the sandbox has failed: {str(message)[:500]}")
    last = answer.get("run_result") or answer.get("compile_result") or {}
    over = last.get("status") == "TimeLimitExceeded"
    return Result(
        "timeout" if over else "finished",
        last.get("return_code"),
        last.get("stdout") or "",
        last.get("stderr") or "",
        "server",
    )
