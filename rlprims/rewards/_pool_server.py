"""The processes of :class:`rlprims.rewards.pool.Pool`: a server that imports once, and the workers that it forks.

The server has one thread, runs no verifier and takes no lock, so that it can always fork, kill and reap. It exits, with
all workers, when the trainer exits or waits no more. A request is a line with the number of rows, and a line for each.
"""

import ctypes
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlprims._imports import imported
from rlprims.rewards._outcome import Failure, outcomes, raised

_PARENT_CHECK = 1.0  # seconds between checks whether the trainer is alive


def main() -> None:
    """``python -m rlprims.rewards._pool_server FD PARENT``."""
    control, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    requests, workers, problem = control.makefile("rb"), list[_Worker](), b""
    job = json.loads(requests.readline() or "null")
    try:
        list(map(import_module, job["preload"]))
        job["function"] = imported(job["verifier"])
    except Exception as error:
        problem = json.dumps({"error": str(raised(error))}).encode()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    signal.signal(signal.SIGALRM, lambda *_: None if os.getppid() == parent else sys.exit())
    signal.setitimer(signal.ITIMER_REAL, _PARENT_CHECK, _PARENT_CHECK)
    try:
        while count := requests.readline():
            rows = [requests.readline() for _ in range(int(count))]
            with suppress(ConnectionError):  # the trainer has ended
                control.sendall((problem or b"[" + b",".join(_score(rows, job, workers, control)) + b"]") + b"\n")
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """The server's end of a worker, and the row that it has."""

    def __init__(self, job: dict[str, Any], others: Sequence[Any]) -> None:
        self.connection, theirs = Pipe()
        self.rows_left, self.index, self.deadline = job["recycle_after"], -1, math.inf
        self.pid = os.fork()
        if self.pid == 0:
            for ours in [self.connection, *others]:
                ours.close()
            _work(job, theirs)
        theirs.close()

    def end(self) -> int:
        """Kill the worker and its process group, and return its exit code, negative for a signal."""
        self.connection.close()
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _score(rows: Sequence[bytes], job: dict[str, Any], workers: list[_Worker], control: socket.socket) -> list[bytes]:
    """The outcome of each row as JSON."""
    found, again, waiting, until = dict[int, bytes](), set[int](), deque(enumerate(rows)), 0.0
    while len(found) < len(rows):
        ends: list[Any] = [control, *(worker.connection for worker in workers)]
        readable = select.select(ends, [], [], min(max(until - time.monotonic(), 0.0), _PARENT_CHECK))[0]
        if control in readable:
            sys.exit()  # the trainer has ended, or waits no more
        for worker in workers[:]:
            outcome, index = _received(worker, workers, worker.connection in readable, job["seconds"]), worker.index
            if outcome and index >= 0:
                worker.index, worker.deadline = -1, math.inf
                if index not in again and outcome.startswith(b'["killed by SIGKILL"'):  # perhaps not by this row
                    again.add(index)
                    waiting.append((index, rows[index]))
                else:
                    found[index] = outcome
        while len(workers) < min(job["workers"], len(rows) - len(found)):
            workers.append(_Worker(job, [control, *(worker.connection for worker in workers)]))
        for worker in workers:
            if waiting and worker.index < 0:
                worker.index, row = waiting.popleft()
                worker.deadline = time.monotonic() + job["seconds"]
                with suppress(OSError):  # it has ended, which the next read tells
                    worker.connection.send_bytes(row)
        until = min((worker.deadline for worker in workers), default=0.0)
    return [found[index] for index in range(len(rows))]


def _received(worker: _Worker, workers: list[_Worker], is_readable: bool, seconds: float) -> bytes:
    """The outcome of the worker's row, or nothing. Ends a worker that is late, or must be replaced."""
    outcome, is_late = b"", False
    with suppress(OSError, EOFError):  # it has ended
        outcome = worker.connection.recv_bytes() if is_readable else b""
        worker.rows_left -= bool(outcome)
        is_late = not outcome and time.monotonic() >= worker.deadline
        out_of_memory = outcome.startswith(b'["raised MemoryError"')  # the memory may still be in use
        if not is_late and not out_of_memory and worker.rows_left:
            return outcome
    workers.remove(worker)
    status = worker.end()
    if is_late:
        failure = Failure("timeout", f"took more than {seconds:g} s")
    elif status == -signal.SIGXCPU:
        failure = Failure("CPU limit", "took more CPU time than cpu_seconds")
    else:
        cause = f"killed by {signal.Signals(-status).name}" if status < 0 else "worker exited"
        failure = Failure(
            cause, f"with code {status}: out of memory, memory_mb too small, or a crash in compiled code?"
        )
    return outcome or json.dumps(failure).encode()


def _work(job: dict[str, Any], connection: "Connection[Any, Any]") -> None:
    """Run a worker; never returns."""
    try:
        server, worker = os.getppid(), os.getpid()
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
            if job["memory_mb"] is not None:
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                size = pages * resource.getpagesize() + job["memory_mb"] * 2**20
                resource.setrlimit(resource.RLIMIT_AS, (size, size))
        while os.getppid() == server:
            arguments, named = json.loads(connection.recv_bytes())
            if job["cpu_seconds"] is not None:
                limit = math.ceil(time.process_time() + job["cpu_seconds"])
                resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            try:
                (outcome,) = outcomes(job["function"], arguments, {**named, **job["options"]})
            except SystemExit as error:
                outcome = raised(error)
            if os.getpid() == worker:  # and not a process that the verifier has forked
                connection.send_bytes(json.dumps(outcome).encode())
    finally:
        os._exit(1)  # skips the clean-up of the server


if __name__ == "__main__":
    main()
