"""The processes of :class:`rlprims.rewards.pool.Pool`: a server that imports once, and the workers that it forks.

The server runs no verifier and takes no lock, so that it can always fork, kill and reap. It exits, with all workers,
when the trainer exits. All messages are JSON.
"""

import ctypes
import importlib
import json
import math
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlprims._imports import imported
from rlprims.rewards._outcome import Failure, Outcome, outcomes, raised

IDLE = -1
_PARENT_CHECK = 1.0  # seconds between checks whether the trainer is alive
_FLUSH = 0.005  # seconds of results that a killed worker may lose; they are scored again


def main() -> None:
    """``python -m rlprims.rewards._pool_server FD PARENT``."""
    control, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    lines = control.makefile("rb")
    job = json.loads(lines.readline())
    try:
        for module in job["preload"]:
            importlib.import_module(module)
        verifier = imported(job["verifier"])
    except Exception as error:
        _answer(control, {"error": str(raised(error))})
        return
    _answer(control, {})
    workers: set[int] = set()
    try:
        while True:
            if not select.select([control], [], [], _PARENT_CHECK)[0]:
                if os.getppid() != parent:
                    return
                continue
            message, descriptors, _, _ = socket.recv_fds(control, 4096, 2)
            if not message:
                return
            request = json.loads(message)
            if "end" in request:
                workers.discard(request["end"])
                _answer(control, {"status": _end(request["end"])})
                continue
            pid = os.fork()
            if pid == 0:
                control.close()
                _work(verifier, job, *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            workers.add(pid)
            _answer(control, {"pid": pid})
    finally:
        for pid in workers:
            _end(pid)


def _answer(control: socket.socket, message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the trainer has ended, which the next read reports
        control.sendall(json.dumps(message).encode() + b"\n")


def _end(pid: int) -> int:
    """Kill a worker and its process group, and return its exit code, negative for a signal."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _work(verifier: Callable[..., Any], job: dict[str, Any], connection: int, progress: int) -> None:
    """Run a worker; never returns."""
    code = 1
    try:
        server = os.getppid()
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
            if os.getppid() != server:
                return
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if job["memory_mb"] is not None:
            size = _address_space() + job["memory_mb"] * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        _score(verifier, job, socket.socket(fileno=connection), mmap.mmap(progress, 8))
        code = 0
    finally:
        os._exit(code)  # skips the clean-up of the server


def _score(verifier: Callable[..., Any], job: dict[str, Any], connection: socket.socket, progress: mmap.mmap) -> None:
    options, left = job["options"], job["recycle_after"]
    requests = connection.makefile("rb")
    while left > 0 and (request := requests.readline()):
        done: list[tuple[int, Outcome]] = []
        flushed = -math.inf
        for index, arguments, named in json.loads(request):
            now = time.monotonic()
            if now - flushed > _FLUSH:
                _send(connection, done)
                done, flushed = [], now
                _limit_cpu(job["cpu_seconds"])
            progress[:] = struct.pack("q", index)
            try:
                (outcome,) = outcomes(verifier, arguments, {**named, **options})
            except SystemExit as error:
                outcome = raised(error)
            done.append((index, outcome))
            out_of_memory = isinstance(outcome, Failure) and outcome.cause == "raised MemoryError"
            left = 0 if out_of_memory else left - 1  # the memory may still be in use
            if left == 0:
                break
        progress[:] = struct.pack("q", IDLE)
        _send(connection, done)


def _send(connection: socket.socket, done: list[tuple[int, Outcome]]) -> None:
    if done:
        connection.sendall(json.dumps(done).encode() + b"\n")


def _limit_cpu(seconds: float | None) -> None:
    if seconds is not None:
        limit = math.ceil(time.process_time() + seconds + _FLUSH)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _address_space() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main()
