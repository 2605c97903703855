"""Wait for workers, and notice if the cluster's head is lost, or if nothing goes on in a start.

Without its head (the GCS) Ray starts no worker and reports no death of one; after a minute it ends the driver.
"""

import atexit
import errno
import logging
import math
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import ray
from ray.experimental import internal_kv
from ray.util.client import ray as client

from rlprims._event_loop import in_daemon
from rlprims.execution import ExecutionError

_CHECK_INTERVAL = 2.0
"""Seconds between two connections to the head, and between two reports of a worker that starts."""
_WAIT_SLICE = 0.5
"""Seconds of a wait without a look at the head."""
_RELEASE_SECONDS = 10.0
"""Seconds in which an interrupted start may release its resources."""
_PATIENCE = 10.0
"""Seconds for which the head may be unreachable."""
_RAY_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_UNREACHABLE = {errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}

T = TypeVar("T")
log = logging.getLogger(__name__)


class ClusterLost(ExecutionError):
    """The head of the cluster cannot be reached."""


class _Start:
    """A start ends at ``end``, by the monotonic clock. Progress moves the end."""

    def __init__(self, seconds: float, begun: float) -> None:
        self.seconds, self.end, self.looked, self.reports = seconds, begun + seconds, begun, list[list[str]]()

    def goes_on(self) -> None:
        self.end = time.monotonic() + self.seconds

    def look(self) -> None:
        """Move the end if a worker has worked since the last look."""
        if time.monotonic() < self.looked + _CHECK_INTERVAL:
            return
        before, self.looked = [times for times, _ in self.reports], time.monotonic()
        keys = internal_kv._internal_kv_list(_key_of_reports())
        self.reports = [x.decode().split(" ", 1) for x in map(internal_kv._internal_kv_get, keys) if x]
        if [times for times, _ in self.reports] != before:
            self.goes_on()

    def failure(self, what: str) -> ExecutionError:
        seen = "".join(f"; {where}" for _, where in self.reports)
        return ExecutionError(f"{what}: nothing went on for ray.start_timeout={self.seconds:g} s{seen}{_lost_nodes()}")


class ClusterHead:
    """The head of the cluster that this process, a driver, is connected to."""

    def __init__(self) -> None:
        self.watch()
        self.session: Any = None  # the folder of a cluster that was started here
        self.failed = True  # until a run is complete

    def ended(self, *, failed: bool) -> None:
        """End the use of a cluster that was started here. After a failure its folder stays, and a line says where."""
        self.failed = failed
        if failed and self.session is not None:
            log.warning("the logs of the run's cluster are kept: %s/logs", self.session)

    def watch(self) -> None:
        """Begin to watch the head of a cluster."""
        self.lost = False
        self.patience = _PATIENCE
        self._tried = 0.0
        self._silent_since: float | None = None

    def restarts(self) -> None:
        """Be as patient as Ray: the head of a cluster that others run may be restarted."""
        self.patience = max(_PATIENCE, float(os.environ.get(_RAY_PATIENCE, "60")) - _PATIENCE)

    def check(self) -> None:
        """Connect to the head if the last time is long ago; raise ClusterLost if it was out of reach for too long."""
        now = time.monotonic()
        if now - self._tried < _CHECK_INTERVAL or client.is_connected() or not ray.is_initialized():
            return
        context = ray.get_runtime_context()
        if context.get_actor_id() is not None:  # a worker; the driver notices it, too
            return
        self._tried = now
        host, _, port = context.gcs_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CHECK_INTERVAL).close()
        except OSError as error:
            if not isinstance(error, TimeoutError) and error.errno not in _UNREACHABLE:
                return  # it says nothing about the head
            self._silent_since = now if self._silent_since is None else self._silent_since
            if now - self._silent_since < self.patience:
                return
            self.lost = True
            atexit.unregister(ray.shutdown)  # it would wait for the head; see _end
            raise ClusterLost(
                f"the head of the Ray cluster at {context.gcs_address} was lost: {error.strerror or error} for "
                f"{self.patience:g} s"
            ) from None
        else:
            self._silent_since = None


def _end() -> None:
    """End this process, if the head was lost: without ``ray.shutdown`` Ray's threads would end it by a signal."""
    if HEAD.lost:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)
    if HEAD.session is not None and not HEAD.failed:  # after a complete run nothing of its cluster stays behind
        ray.shutdown()
        shutil.rmtree(HEAD.session, ignore_errors=True)


HEAD = ClusterHead()
atexit.register(_end)
START = ContextVar("start", default=_Start(math.inf, math.inf))  # noqa: B039
"""The start that this thread is in. The default is none: it has no end."""


def start(function: Callable[[], T], seconds: float, begun: float) -> T:
    """Call a function that starts workers; it ends after ``seconds`` without progress, the first of them at ``begun``.

    It runs in a thread, because nothing can interrupt a call of Ray that waits for the head. Errors: as :func:`wait`.
    """
    limit = _Start(seconds, begun)

    def limited() -> T:
        START.set(limit)
        return function()

    outcome = in_daemon(limited, Future[T]())
    try:
        while not wait_for([outcome], timeout=_WAIT_SLICE).done:
            HEAD.check()
            if time.monotonic() >= limit.end + _RELEASE_SECONDS:
                raise limit.failure("Ray does not answer")
        return outcome.result()
    except BaseException as error:  # Ctrl-C, too
        limit.seconds = limit.end = -math.inf  # the function waits no longer, and releases what it has
        if not HEAD.lost:
            wait_for([outcome], timeout=_RELEASE_SECONDS)
        HEAD.ended(failed=isinstance(error, Exception))
        raise


def wait(refs: Sequence[Any], timeout: float, who: str) -> tuple[list[Any], list[Any]]:
    """Wait until a call is complete; returns the complete calls, none after ``timeout``, and the others.

    Raises:
        ClusterLost: the head of the cluster was lost.
        ExecutionError: nothing goes on in a start.
    """
    end, limit = time.monotonic() + timeout, START.get()
    while True:
        HEAD.check()
        left = min(end, limit.end) - time.monotonic()
        done, waiting = ray.wait(list(refs), timeout=max(0.0, min(left, _WAIT_SLICE)))
        if done:
            limit.goes_on()
            return done, waiting
        limit.look()
        if time.monotonic() >= limit.end:
            raise limit.failure(f"no answer from {who}")
        if time.monotonic() >= end:
            return done, waiting


@contextmanager
def reports_work() -> Iterator[None]:
    """Decorates a method of an actor in a start. While it runs, a thread reports whether the process works, and where.

    The reports are in the key-value store of the head, because the actor answers no call meanwhile.
    """
    caller, ended = threading.get_ident(), threading.Event()

    def report() -> None:
        key, work, times = _key_of_reports() + ray.get_runtime_context().get_actor_id(), _work(), 0
        while not ended.wait(_CHECK_INTERVAL):
            before, work = work, _work()
            times += work - before > 0.1 * _CHECK_INTERVAL  # Ray's own threads use 0.01 of a core
            code = sys._current_frames()[caller].f_code
            where = f"process {os.getpid()} is in {code.co_qualname} of {code.co_filename}"
            internal_kv._internal_kv_put(key, f"{times} {where}")
        internal_kv._internal_kv_del(key)

    threading.Thread(target=report, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _key_of_reports() -> str:
    return f"rlprims {ray.get_runtime_context().get_job_id()} "


def _work() -> float:
    """Seconds of CPU time of this process and its children, and one for each 50 MB that they read from a disk."""
    import psutil  # Ray brings it

    work = -time.thread_time()  # of the thread that reports
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            work += sum(process.cpu_times()[:4]) + process.io_counters().read_bytes / 50e6
    return work


def _lost_nodes() -> str:
    lost = sorted({node["NodeManagerAddress"] for node in ray.nodes() if not node["Alive"]})
    return f"; the cluster lost the nodes {', '.join(lost)}" if lost else ""
