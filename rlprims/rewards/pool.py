"""Scoring in worker processes that are killed if a row exceeds its limits: :class:`Pool`."""

import json
import mmap
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias, cast

from rlprims.masking import check_choice
from rlprims.rewards._outcome import Failure, Outcome, plain, wants
from rlprims.rewards._pool_server import IDLE
from rlprims.rewards.scoring import Row, Scores, to_rows, to_scores
from rlprims.rewards.verifiers._imported import imported

__all__ = ["Pool"]

_CHUNK_SECONDS = 0.02
_LARGEST_CHUNK = 256
_LIMITS = ("timeout", "CPU limit", "raised MemoryError")
_PATIENCE = 20
"""The number of processes that may end, one after the other, before a row is scored."""

AtLimit: TypeAlias = Literal["nan", "zero"]


class Pool:
    """Worker processes that score rows by a verifier, with limits per row that are enforced by killing the worker.

    If a row takes longer than ``seconds``, or its worker dies (out of memory, a crash in C), the row has no score, and
    the worker is killed and replaced. No other row is lost, and the order is kept. Rows are sent in batches to workers
    that stay alive, so that the overhead is small for cheap verifiers. A new worker is forked, in milliseconds, from a
    server that has imported everything.

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
        preload: modules that the verifier imports when it first runs, such as ``math_verify``: imported once.
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
        path = verifier if isinstance(verifier, str) else _path(verifier)
        self._wants = wants(imported(path))
        self._seconds = seconds
        self._zero_at_limit = timeout == "zero"
        self._lock = threading.Lock()
        self._chunk = 8
        self._workers: list[_Worker | None] = [None] * workers
        job = {
            "verifier": path,
            "options": dict(options or {}),
            "preload": list(preload),
            "cpu_seconds": cpu_seconds,
            "memory_mb": memory_mb,
            "recycle_after": recycle_after,
        }
        self._job = json.dumps(job, default=_path)
        self._server = _Server(self._job)
        self._finalizer = weakref.finalize(self, _Server.close, self._server)

    def __call__(
        self, responses: Sequence[str], answers: Sequence[Any], extra: Mapping[str, Sequence[Any]] | None = None
    ) -> Scores:
        """Score a batch. The verifier gets the columns of ``extra`` that it has as parameters.

        Raises:
            ValueError: columns of different lengths, or one that the verifier needs is missing; the pool is closed.
            RuntimeError: workers end before any row is scored. If some rows have scores, these are returned, and the
                other rows fail with ``no worker``.
        """
        rows = to_rows(self._wants, responses, answers, extra)
        with self._lock:
            if not self._finalizer.alive:
                raise ValueError("the pool is closed")
            try:
                outcomes = self._score(rows)
            except BaseException:  # an interrupt: workers must not continue with rows of this call
                with suppress(_ServerEnded):
                    for slot in range(len(self._workers)):
                        self._end(slot)
                raise
        return to_scores([_zero(outcome) for outcome in outcomes] if self._zero_at_limit else outcomes)

    def close(self) -> None:
        """End every process of the pool."""
        self._finalizer()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _score(self, rows: Sequence[Row]) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(rows)
        todo: deque[tuple[int, bytes]] = deque()
        for index, row in enumerate(rows):
            try:
                todo.append((index, json.dumps([index, *row], default=plain).encode()))
            except (TypeError, ValueError, RecursionError) as error:
                outcomes[index] = Failure("not JSON", str(error))
        rounds_without_result = 0
        while todo or any(worker and worker.pending for worker in self._workers):
            try:
                done = self._round(todo, outcomes)
            except _ServerEnded as error:
                self._take_back(todo, outcomes)
                done, problem = False, str(error)
                with suppress(_ServerEnded):
                    self._start_server()
            else:
                problem = "workers end before they score anything: is memory_mb too small?"
            if done is None:
                continue
            rounds_without_result = 0 if done else rounds_without_result + 1
            if rounds_without_result > _PATIENCE + len(self._workers):
                if not any(isinstance(outcome, dict) for outcome in outcomes):
                    raise RuntimeError(problem)
                self._take_back(todo, outcomes)
                for index, _ in todo:
                    outcomes[index] = Failure("no worker", problem)
                break
        return cast(list[Outcome], outcomes)  # every row has an outcome

    def _round(self, todo: deque[tuple[int, bytes]], outcomes: list[Outcome | None]) -> bool | None:
        """One round of sending and receiving: True if a row is done, False if only a worker ended, None if neither."""
        for slot in range(len(self._workers)):
            worker = self._workers[slot]
            if todo and (worker is None or not worker.pending):
                if worker is None:
                    worker = self._workers[slot] = _Worker(self._server)
                chunk = [todo.popleft() for _ in range(min(self._chunk, -(-len(todo) // len(self._workers))))]
                worker.give(chunk, self._seconds)
        done: bool | None = None
        for slot, cause in self._wait():
            worker = self._workers[slot]
            assert worker is not None
            done = worker.take(outcomes, self._seconds) or done
            if cause is None and not worker.ended:
                if not worker.pending:
                    self._chunk = _next_size(self._chunk, worker.chunk_rows, worker.elapsed)
                continue
            failure, lost = self._retire(slot, cause, outcomes)
            todo.extendleft(reversed(lost))
            done = done or failure
        return done

    def _take_back(self, todo: deque[tuple[int, bytes]], outcomes: list[Outcome | None]) -> None:
        """Take the unscored rows back from every worker, so that no worker continues to score."""
        for slot, worker in enumerate(self._workers):
            if worker is not None:
                with suppress(_ServerEnded):
                    self._server.ask({"end": worker.pid})
                worker.take(outcomes, self._seconds)
                todo.extendleft(reversed(worker.pending.items()))
                worker.connection.close()
                self._workers[slot] = None

    def _start_server(self) -> None:
        """Start the server, or replace one that has ended."""
        self._server.close()
        server = _Server(self._job)
        self._finalizer.detach()
        self._server, self._finalizer = server, weakref.finalize(self, _Server.close, server)

    def _wait(self) -> list[tuple[int, str | None]]:
        """The workers with a message, and, with a cause, those that have exceeded their time."""
        busy = {slot: worker for slot, worker in enumerate(self._workers) if worker and worker.pending}
        if not busy:
            return []
        with selectors.DefaultSelector() as selector:
            for slot, worker in busy.items():
                selector.register(worker.connection, selectors.EVENT_READ, slot)
            left = min(worker.deadline for worker in busy.values()) - time.monotonic()
            ready = {key.data for key, _ in selector.select(max(0.0, left))}
        now = time.monotonic()
        overdue = {slot for slot, worker in busy.items() if slot not in ready and worker.deadline <= now}
        return [(slot, None) for slot in ready] + [(slot, "timeout") for slot in overdue]

    def _retire(
        self, slot: int, cause: str | None, outcomes: list[Outcome | None]
    ) -> tuple[bool, list[tuple[int, bytes]]]:
        """End a worker. Its current row fails, and its other rows are returned to be scored by other workers."""
        worker = self._workers[slot]
        assert worker is not None
        status = self._end(slot)
        worker.take(outcomes, self._seconds)  # results that it had sent before it ended
        index = worker.at()
        was_scoring = index in worker.pending
        if was_scoring:
            outcomes[index] = _failure(cause, status, self._seconds)
            del worker.pending[index]
        worker.connection.close()
        return was_scoring, list(worker.pending.items())

    def _end(self, slot: int) -> int:
        worker = self._workers[slot]
        status = 0 if worker is None else int(self._server.ask({"end": worker.pid})["status"])
        self._workers[slot] = None
        return status


class _ServerEnded(RuntimeError):
    """The server process has ended, and its workers too."""


class _Server:
    """The trainer's end of the server."""

    def __init__(self, job: str) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlprims.rewards._pool_server", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,  # Ctrl-C is the trainer's
            )
        self._answers = self._control.makefile("rb")
        try:
            with suppress(OSError):  # the server has ended; reading its answer reports that
                self._control.sendall(job.encode() + b"\n")
            if problem := self._answer().get("error"):
                raise ValueError(f"the verifier cannot be imported in another process: {problem}")
        except BaseException:
            self.close()
            raise

    def ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
        except OSError as error:
            raise _ServerEnded(f"the pool's server process has ended: {error}") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._answers.readline()
        except OSError:  # reset
            line = b""
        if not line.endswith(b"\n"):
            raise _ServerEnded("the pool's server process has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._answers.close()
        self._control.close()  # the server then ends its workers and exits
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Worker:
    """The trainer's end of a worker."""

    def __init__(self, server: _Server) -> None:
        self.connection, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as file, theirs:
            file.truncate(8)
            self._progress = mmap.mmap(file.fileno(), 8)
            self._progress[:] = struct.pack("q", IDLE)
            self.pid: int = server.ask({}, [theirs.fileno(), file.fileno()])["pid"]
        self.pending: dict[int, bytes] = {}
        self.ended = False
        self.chunk_rows = 0
        self.elapsed = 0.0
        self.deadline = 0.0
        self._started = 0.0
        self._unread = b""

    def give(self, chunk: list[tuple[int, bytes]], seconds: float) -> None:
        self.pending = dict(chunk)
        self.chunk_rows = len(chunk)
        self.connection.settimeout(seconds)
        with suppress(OSError):  # the worker has ended; the next read reports that
            self.connection.sendall(b"[" + b",".join(self.pending.values()) + b"]\n")
        self._started = time.monotonic()
        self.deadline = self._started + seconds

    def take(self, outcomes: list[Outcome | None], seconds: float) -> bool:
        """Read available results; returns whether any row is done. Each result restarts the clock for the next row."""
        any_done = False
        self.connection.settimeout(0)
        while not self.ended:
            try:
                part = self.connection.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            self.ended = not part
            *lines, self._unread = (self._unread + part).split(b"\n")
            for line in lines:
                for index, outcome in json.loads(line):
                    outcomes[index] = Failure(*outcome) if isinstance(outcome, list) else outcome
                    self.pending.pop(index, None)
                    any_done = True
        if any_done:
            now = time.monotonic()
            self.deadline, self.elapsed = now + seconds, now - self._started
        return any_done

    def at(self) -> int:
        """The row that the worker is scoring."""
        index: int = struct.unpack("q", self._progress[:])[0]
        return index


def _failure(cause: str | None, status: int, seconds: float) -> Failure:
    if cause == "timeout":
        return Failure("timeout", f"took more than {seconds:g} s")
    if status == -signal.SIGXCPU:
        return Failure("CPU limit", "took more CPU time than cpu_seconds")
    if status < 0:
        name = signal.Signals(-status).name
        return Failure(f"killed by {name}", "out of memory?" if name == "SIGKILL" else "a crash in compiled code?")
    return Failure("worker exited", f"with code {status}")


def _zero(outcome: Outcome) -> Outcome:
    if isinstance(outcome, Failure) and outcome.cause in _LIMITS:
        return {"score": 0.0, "acc": 0.0, "limit_reached": 1.0}
    return outcome


def _next_size(size: int, rows: int, elapsed: float) -> int:
    """The size of a chunk of about 20 ms: long enough for a small overhead, short enough to balance the workers."""
    fits = int(rows * _CHUNK_SECONDS / max(elapsed, 1e-6))
    return max(1, min(fits, 2 * size, _LARGEST_CHUNK))


def _path(verifier: Any) -> str:
    name = getattr(verifier, "__qualname__", None)
    if name is None:
        raise TypeError(f"{type(verifier).__name__} is not JSON")
    path = f"{verifier.__module__}.{name}"
    if verifier.__module__ == "__main__" or imported(path) is not verifier:
        raise ValueError(f"{path} cannot be imported in another process: define the function in a module")
    return path
