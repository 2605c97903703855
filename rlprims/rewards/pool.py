"""Scoring in worker processes that are killed if a row exceeds its limits: :class:`Pool`."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, TypeAlias

from rlprims._imports import absolute, file_of
from rlprims.masking import check_choice
from rlprims.rewards._columns import Data, by_row, imported, wants
from rlprims.rewards._outcome import Failure, Outcome, Scores, encoded, to_scores
from rlprims.rewards._waiting import in_thread, wait_for

__all__ = ["Pool"]


AtLimit: TypeAlias = Literal["nan", "zero"]


class Pool:
    """Worker processes that score rows by a verifier, with limits per row that are enforced by killing the worker.

    If a row takes longer than ``seconds``, or its worker dies (out of memory, a crash in C), the row has no score. No
    other row is lost, and the order is kept. Workers stay alive for the next row, which costs about 50 µs. A new worker
    is forked, in milliseconds, from a server that has imported everything.

    The verifier must be importable (a function of a module, not of a notebook's cell), because it runs in other
    processes; answers, options and results must be JSON. All processes end when the trainer ends for any reason.

    Args:
        verifier: function or import path: (response, answer, further columns by name, *, options).
        options: the options of the verifier.
        workers: the number of processes.
        seconds: wall time of one row.
        cpu_seconds: CPU time of one row, rounded up to a whole second; None: no limit.
        memory_mb: address space that a worker may take in addition to what it has at its start; None: no limit.
        recycle_after: rows after which a worker is replaced, which frees leaked memory.
        preload: modules that the verifier imports when it first runs, such as ``sympy`` for ``math``: imported once.
        timeout: the score of a row that exceeded a limit of time or memory. ``nan``: it has no score, and its group is
            not trained on, so the policy does not learn to avoid programs that do not end. ``zero``: its score is 0,
            and the column ``limit_reached`` is 1; on a slow machine correct answers may then count as wrong.

    Raises:
        ValueError: the verifier cannot be imported in another process; an unknown ``timeout``.

    >>> from rlprims.rewards import verifiers
    >>> with Pool(verifiers.gsm8k, {"strict": True}, workers=1) as pool:  # doctest: +SKIP
    ...     pool(["#### 72", "72"], ["72", "72"]).scores
    tensor([1., 0.])
    """

    def __init__(
        self,
        verifier: Callable[..., Any] | str,
        options: Mapping[str, Any] | None = None,
        *,
        workers: int = 2,
        seconds: float = 10.0,
        cpu_seconds: float | None = None,
        memory_mb: int | None = 2048,
        recycle_after: int = 100_000,
        preload: Sequence[str] = (),
        timeout: AtLimit = "nan",
    ) -> None:
        check_choice("timeout", timeout, AtLimit)
        if workers < 1 or seconds <= 0:
            raise ValueError(f"workers={workers} and seconds={seconds}, expected at least 1 worker and seconds above 0")
        path = absolute(verifier) if isinstance(verifier, str) else _path(verifier)
        self._wants = wants(imported(path))
        self._zero_at_limit = timeout == "zero"
        limits = {"seconds": seconds, "cpu_seconds": cpu_seconds, "memory_mb": memory_mb}
        job = {"verifier": path, "options": dict(options or {}), "preload": list(preload), "workers": workers, **limits}
        self._job = json.dumps(job | {"recycle_after": recycle_after}, default=_path).encode() + b"\n"
        self._lock = asyncio.Lock()
        self._servers: list[_Server] = []
        self._finalizer = weakref.finalize(self, _end, self._servers)
        wait_for(self._ask([]))

    def __call__(
        self, responses: Sequence[str], answers: Sequence[Any], extra: Mapping[str, Sequence[Any]] | None = None
    ) -> Scores:
        """Score a batch. The verifier gets the columns of ``extra`` that it has as parameters.

        Raises:
            ValueError: columns of different lengths, or one that the verifier needs is missing; the pool is closed.
            RuntimeError: the server process has ended three times.
        """
        bound = by_row(self._wants, Data(responses, answers, extra), {})
        rows = [encoded([row.arguments, row.named]) for row in bound]
        found = iter(wait_for(self._ask([row + b"\n" for row in rows if isinstance(row, bytes)])))
        outcomes = [row if isinstance(row, Failure) else next(found) for row in rows]
        return to_scores([_zero(outcome) for outcome in outcomes] if self._zero_at_limit else outcomes)

    def close(self) -> None:
        """End every process of the pool."""
        self._finalizer()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _ask(self, rows: Sequence[bytes]) -> list[Outcome]:
        """The outcomes of encoded rows. If the server ends, a new one scores all of them."""
        async with self._lock:
            for _ in range(3):
                if not self._finalizer.alive:
                    raise ValueError("the pool is closed")
                if not self._servers:
                    self._servers.append(_Server(self._job))
                try:
                    return await in_thread(partial(self._servers[0].ask, b"%d\n" % len(rows) + b"".join(rows)))
                except BaseException as error:
                    _end(self._servers)  # after an interrupt no worker goes on with these rows
                    if not isinstance(error, OSError):
                        raise
            raise RuntimeError("the pool's server process ends again and again")


class _Server:
    """The trainer's end of the server."""

    def __init__(self, job: bytes) -> None:
        self._job = job
        self._control, theirs = socket.socketpair()
        self._answers = self._control.makefile("rb")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlprims.rewards._pool_server", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,  # Ctrl-C is the trainer's
            )

    def ask(self, message: bytes) -> list[Outcome]:
        self._control.sendall(self._job + message)
        self._job = b""
        if not (line := self._answers.readline()).endswith(b"\n"):
            raise ConnectionError("the server has ended")
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise ValueError(f"the verifier cannot be imported in another process: {answer['error']}")
        return [Failure(*outcome) if isinstance(outcome, list) else outcome for outcome in answer]

    def end(self) -> None:
        self._process.terminate()  # it ends its workers, and then itself
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._control.close()


def _end(servers: list[_Server]) -> None:
    while servers:
        servers.pop().end()


def _zero(outcome: Outcome) -> Outcome:
    at_limit = isinstance(outcome, Failure) and outcome.cause in ("timeout", "CPU limit", "raised MemoryError")
    return {"score": 0.0, "acc": 0.0, "limit_reached": 1.0} if at_limit else outcome


def _path(verifier: Any) -> str:
    name = getattr(verifier, "__qualname__", None)
    if name is None:
        raise TypeError(f"{type(verifier).__name__} is not JSON")
    path = file_of(verifier) or f"{verifier.__module__}.{name}"
    if verifier.__module__ == "__main__" or imported(path) is not verifier:
        raise ValueError(f"{path} cannot be imported in another process: define the function in a module")
    return path
