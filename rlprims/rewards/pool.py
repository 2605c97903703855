"""Scoring in worker processes that are killed if a row exceeds its limits: :class:`Pool`."""

import asyncio
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias, cast

from rlprims._imports import absolute, file_of
from rlprims.masking import check_choice
from rlprims.rewards._columns import Bound, Data, by_row, imported, plain, wants
from rlprims.rewards._outcome import Failure, Outcome, Scores, to_scores
from rlprims.rewards._pool_server import IDLE
from rlprims.rewards._waiting import wait_for

__all__ = ["Pool"]

_CHUNK_SECONDS = 0.02
_LARGEST_CHUNK = 256
_LIMITS = ("timeout", "CPU limit", "raised MemoryError")
_PATIENCE = 20
"""The number of processes that may end, one after the other, before a row is scored."""

AtLimit: TypeAlias = Literal["nan", "zero"]
_Note: TypeAlias = Callable[[int, Outcome], None]


class Pool:
    """Worker processes that score rows by a verifier, with limits per row that are enforced by killing the worker.

    If a row takes longer than ``seconds``, or its worker dies (out of memory, a crash in C), the row has no score. No
    other row is lost, and the order is kept. Rows are sent in batches to workers that stay alive, so that the overhead
    is small for cheap verifiers. A new worker is forked, in milliseconds, from a server that has imported everything.

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
        self._seconds = seconds
        self._zero_at_limit = timeout == "zero"
        self._lock = asyncio.Lock()
        self._chunk = 8
        self._workers: list[_Worker | None] = [None] * workers
        limits = {"cpu_seconds": cpu_seconds, "memory_mb": memory_mb, "recycle_after": recycle_after}
        job = {"verifier": path, "options": dict(options or {}), "preload": list(preload), **limits}
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
        batch = _Batch(by_row(self._wants, Data(responses, answers, extra), {}))
        wait_for(self._score(batch))
        outcomes = cast(list[Outcome], batch.outcomes)  # every row has an outcome
        return to_scores([_zero(outcome) for outcome in outcomes] if self._zero_at_limit else outcomes)

    def close(self) -> None:
        """End every process of the pool."""
        self._finalizer()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _score(self, batch: "_Batch") -> None:
        async with self._lock:
            if not self._finalizer.alive:
                raise ValueError("the pool is closed")
            try:
                async with asyncio.TaskGroup() as group:
                    slots = [group.create_task(self._work(slot, batch)) for slot in range(len(self._workers))]
                    await batch.waiting.join()
                    for task in slots:
                        task.cancel()
            except BaseException as error:  # workers must not continue with rows of this call
                for worker in self._workers:
                    if worker is not None:
                        with suppress(_ServerEnded):
                            worker.end()
                self._workers = [None] * len(self._workers)
                if not isinstance(error, BaseExceptionGroup):
                    raise  # an interrupt
                batch.give_up(error.exceptions[0])

    async def _work(self, slot: int, batch: "_Batch") -> None:
        """Have rows scored by the worker of this slot, and by a new one after it has ended."""
        while True:
            chunk = await batch.take(self._chunk, len(self._workers))
            rows, began, server = len(chunk), time.monotonic(), self._server
            problem = "workers end before they score anything: is memory_mb too small?"
            try:
                worker = self._workers[slot] = self._workers[slot] or _Worker(server)
                server = worker.server
                if await worker.score(chunk, self._seconds, batch.note):
                    # About 20 ms: long enough for a small overhead, short enough to balance the workers.
                    fits = int(rows * _CHUNK_SECONDS / max(time.monotonic() - began, 1e-6))
                    self._chunk = max(1, min(fits, 2 * self._chunk, _LARGEST_CHUNK))
                    batch.fruitless = 0
                    continue
                self._workers[slot] = None
                worker.retire(chunk, self._seconds, batch.note)
            except _ServerEnded as error:
                self._workers[slot], problem = None, str(error)
                if server is self._server:
                    self._start_server()
            batch.put_back(chunk)
            batch.fruitless = 0 if len(chunk) < rows else batch.fruitless + 1
            if batch.fruitless > _PATIENCE + len(self._workers):
                raise RuntimeError(problem)

    def _start_server(self) -> None:
        """Replace a server that has ended."""
        self._server.close()
        server = _Server(self._job)
        self._finalizer.detach()
        self._server, self._finalizer = server, weakref.finalize(self, _Server.close, server)


class _Batch:
    """The rows of a call: those that wait for a worker, and the outcomes of all."""

    def __init__(self, rows: Sequence[Bound]) -> None:
        self.fruitless = 0  # the number of workers that ended, one after the other, without an outcome
        self.outcomes: list[Outcome | None] = [None] * len(rows)
        self.waiting: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        for index, row in enumerate(rows):
            try:
                self.waiting.put_nowait((index, json.dumps([index, row.arguments, row.named], default=plain).encode()))
            except (TypeError, ValueError, RecursionError) as error:
                self.outcomes[index] = Failure("not JSON", str(error))

    async def take(self, most: int, workers: int) -> dict[int, bytes]:
        """At least one row, at most ``most`` and a worker's share of those that wait."""
        chunk = [await self.waiting.get()]
        share = -(-(self.waiting.qsize() + 1) // workers)
        chunk += [self.waiting.get_nowait() for _ in range(min(most, share) - 1)]
        return dict(chunk)

    def put_back(self, chunk: Mapping[int, bytes]) -> None:
        for row in chunk.items():
            self.waiting.put_nowait(row)
            self.waiting.task_done()

    def note(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.waiting.task_done()

    def give_up(self, problem: BaseException) -> None:
        """Let the rows without an outcome fail; raise the problem if no row has a score."""
        if not isinstance(problem, RuntimeError) or not any(isinstance(found, dict) for found in self.outcomes):
            raise problem
        self.outcomes = [Failure("no worker", str(problem)) if found is None else found for found in self.outcomes]


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
            self._process.kill()  # it still imports, and has no workers
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
        except (OSError, ValueError):  # reset, or closed here
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
        self.server = server
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        with tempfile.TemporaryFile() as file, theirs:
            file.truncate(8)
            self._progress = mmap.mmap(file.fileno(), 8)
            self._progress[:] = struct.pack("q", IDLE)
            self._pid: int = server.ask({}, [theirs.fileno(), file.fileno()])["pid"]
        self._ended = self._timed_out = False
        self._unread = b""

    async def score(self, chunk: dict[int, bytes], seconds: float, note: _Note) -> bool:
        """Note the outcomes of the rows and remove them from the chunk. Returns whether all are done; otherwise the
        worker has ended, or a row has taken more than ``seconds``. Each result restarts the clock for the next row."""
        try:
            async with asyncio.timeout(seconds):
                request = b"[" + b",".join(chunk.values()) + b"]\n"
                await asyncio.get_running_loop().sock_sendall(self._connection, request)
        except OSError:  # it has ended, or does not read
            return False
        while chunk and not self._ended and not self._timed_out:
            is_readable = await self._readable(seconds)
            any_done = self._take(chunk, note)  # also after the time, as this thread may have been late
            self._timed_out = not is_readable and not any_done
        return not chunk

    async def _readable(self, seconds: float) -> bool:
        """Wait until the worker has sent something or ended; False after ``seconds``."""
        loop, sent = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection, sent.set)
        try:
            async with asyncio.timeout(seconds):
                return await sent.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._connection)

    def _take(self, chunk: dict[int, bytes], note: _Note) -> bool:
        """Note the results that have arrived, and return whether there are any."""
        before = len(chunk)
        while not self._ended:
            try:
                part = self._connection.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            self._ended = not part
            *lines, self._unread = (self._unread + part).split(b"\n")
            for line in lines:
                for index, outcome in json.loads(line):
                    if chunk.pop(index, None) is not None:
                        note(index, Failure(*outcome) if isinstance(outcome, list) else outcome)
        return len(chunk) < before

    def retire(self, chunk: dict[int, bytes], seconds: float, note: _Note) -> None:
        """End the worker. The row that it was scoring fails; the rows that are left in the chunk need another one."""
        try:
            status = self.end()
            self._take(chunk, note)  # results that it had sent before it ended
        finally:
            self._connection.close()
        index: int = struct.unpack("q", self._progress[:])[0]
        if chunk.pop(index, None) is not None:
            note(index, _failure(self._timed_out, status, seconds))

    def end(self) -> int:
        return int(self.server.ask({"end": self._pid})["status"])


def _failure(timed_out: bool, status: int, seconds: float) -> Failure:
    if timed_out:
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


def _path(verifier: Any) -> str:
    name = getattr(verifier, "__qualname__", None)
    if name is None:
        raise TypeError(f"{type(verifier).__name__} is not JSON")
    path = file_of(verifier) or f"{verifier.__module__}.{name}"
    if verifier.__module__ == "__main__" or imported(path) is not verifier:
        raise ValueError(f"{path} cannot be imported in another process: define the function in a module")
    return path
