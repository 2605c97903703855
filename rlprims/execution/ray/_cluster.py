"""Start or join a Ray cluster."""

import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from rlprims.execution import ExecutionError

WORKER_ENVIRONMENT = {
    # Run the engine's core in the worker's process, so that its schedule is deterministic. (Tensor parallelism still
    # starts child processes.)
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ENVIRONMENT = {
    # On a CPU: do not compile with C++ before the first answer, use one thread, and listen on loopback only.
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise an engine of two processes requires two NUMA nodes
}
_DRIVER_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes Ray listen on loopback only
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # actors with their own environment cannot use idle processes
    "RAY_memory_monitor_refresh_ms": "0",  # otherwise Ray may kill a worker because other processes use memory
}
_TOKENS = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
_CONNECTING = 15.0
"""Seconds to wait for a TCP connection to the cluster's address."""


def connect(
    address: str | None, *, cpus: float, timeout: float = 60.0, say: Callable[[str], None] = lambda progress: None
) -> None:
    """Join the cluster at ``address`` or the cluster of ``RAY_ADDRESS``; without either, start one on this machine.

    A new cluster has at least ``cpus`` (logical) CPUs.

    Raises:
        ExecutionError: the address does not answer within ``timeout`` seconds, or Ray does not start.
    """
    named = "ray.address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS") or None
    # The driver reports the error of the first rank that fails. Ray would also print the tracebacks of the others.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if address is None:
        for name, value in _DRIVER_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        return
    if address is None:
        say("ray: starting a cluster on this machine")
        _begin(cpus)
    else:
        say(f"ray: joining the cluster at {address}")
        _join(address, named, timeout)


def _begin(cpus: float) -> None:
    """Start a private cluster on this machine, next to any other clusters."""
    import ray
    from ray._private import ray_constants

    has_token = (Path.home() / ".ray" / "auth_token").exists() or bool(os.environ.keys() & _TOKENS)
    # RAY_AUTH_MODE=token alone does not mean that there is a token: child processes of a Ray program inherit it.
    if not has_token and os.environ.get("RAY_AUTH_MODE") != "disabled":
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # otherwise Ray writes one into the home directory
    # Ray read this variable when it was imported, before it was set above.
    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, False)
    try:
        ray.init(
            address="local",  # Ray's file may name a cluster that has ended, or the cluster of another user
            num_cpus=max(int(cpus) + 1, os.cpu_count() or 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # on a busy machine Ray raises a plain Exception
        raise ExecutionError(f"no cluster could be started on this machine: {_first_line(error)}") from error


def _join(address: str, named: str, timeout: float) -> None:
    """Join a cluster within ``timeout`` seconds. Ray itself would try a wrong address for 15 minutes."""
    import ray

    shown = f"{named}={address}"
    other = "start one there by 'ray start --head'; without this setting the run starts its own"
    match = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)/?", address)
    if match:
        try:
            socket.create_connection((match[1], int(match[2])), min(timeout, _CONNECTING)).close()
        except (OSError, OverflowError) as error:
            raise ExecutionError(f"{shown}: no Ray cluster is there ({error}); {other}") from None
    outcome: Future[None] = Future()

    def init() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            outcome.set_result(None)
        except BaseException as error:
            outcome.set_exception(error)

    # Ray runs in another thread, so that this thread can react to Ctrl-C and to the timeout.
    threading.Thread(target=init, daemon=True).start()
    try:
        outcome.result(timeout)
    except TimeoutError:
        raise ExecutionError(f"{shown}: expected an answer from Ray within {timeout:g} s, got none; {other}") from None
    except Exception as error:
        if "RAY_AUTH_MODE" not in os.environ:  # Ray sends its token to an address only if this is set
            other = f"if the cluster has a token, set RAY_AUTH_MODE=token; otherwise {other}"
        raise ExecutionError(f"{shown}: {_first_line(error)}; {other}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
