"""Wait for workers, and notice if the cluster's head is lost, or if a start takes too long.

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
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait as wait_for
from contextvars import ContextVar
from typing import Any, TypeVar

import ray
from ray.util.client import ray as client

from rlprims.execution import ExecutionError
from rlprims.execution.ray._cluster import in_thread

_CHECK_INTERVAL = 2.0
"""Seconds between two connections to the head."""
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
    """The time at which a start must be complete, by the monotonic clock."""

    def __init__(self, seconds: float, begun: float) -> None:
        self.seconds, self.end = seconds, begun + seconds


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
_START: ContextVar[_Start | None] = ContextVar("start", default=None)


def start(function: Callable[[], T], seconds: float, begun: float) -> T:
    """Call a function that starts workers; it must be complete ``seconds`` after ``begun``, by the monotonic clock.

    It runs in a thread, because nothing can interrupt a call of Ray that waits for the head. Errors: as :func:`wait`.
    """
    limit = _Start(seconds, begun)
    HEAD.watch()

    def limited() -> T:
        _START.set(limit)
        return function()

    outcome = in_thread(limited)
    try:
        while not wait_for([outcome], timeout=_WAIT_SLICE).done:
            HEAD.check()
            if time.monotonic() >= limit.end + _RELEASE_SECONDS:
                raise ExecutionError(f"Ray does not answer within ray.start_timeout={seconds:g} s{_lost_nodes()}")
        return outcome.result()
    except BaseException as error:  # Ctrl-C, too
        limit.end = -math.inf  # the function waits no longer, and releases what it has
        if not HEAD.lost:
            wait_for([outcome], timeout=_RELEASE_SECONDS)
        HEAD.ended(failed=isinstance(error, Exception))
        raise


def end_of_start() -> float:
    """Return the time at which this thread must end its waits: infinity, except in a start."""
    limit = _START.get()
    return limit.end if limit else math.inf


def wait(refs: Sequence[Any], timeout: float, who: str) -> tuple[list[Any], list[Any]]:
    """Wait until a call is complete; returns the complete calls, none after ``timeout``, and the others.

    Raises:
        ClusterLost: the head of the cluster was lost.
        ExecutionError: a start takes too long.
    """
    end = time.monotonic() + timeout
    while True:
        HEAD.check()
        left = min(end, end_of_start()) - time.monotonic()
        done, waiting = ray.wait(list(refs), timeout=max(0.0, min(left, _WAIT_SLICE)))
        if done:
            return done, waiting
        limit = _START.get()
        if limit and time.monotonic() >= limit.end:
            raise ExecutionError(f"no answer from {who} within ray.start_timeout={limit.seconds:g} s{_lost_nodes()}")
        if time.monotonic() >= end:
            return done, waiting


def _lost_nodes() -> str:
    lost = sorted({node["NodeManagerAddress"] for node in ray.nodes() if not node["Alive"]})
    return f"; the cluster lost the nodes {', '.join(lost)}" if lost else ""
