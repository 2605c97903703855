"""Start or join a Ray cluster."""

import inspect
import logging
import os
import re
import secrets
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rlprims._event_loop import in_daemon
from rlprims.execution import ExecutionError

log = logging.getLogger(__name__)

WORKER_ENVIRONMENT = {
    # For a deterministic schedule, the engine's core runs in the worker. Tensor parallelism still starts processes.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_F32_DEFAULT": "ieee",  # otherwise tl.dot, and so vLLM's attention, multiplies float32 as TF32
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
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_DRIVER_ENVIRONMENT = {
    _LOOPBACK: "0",  # makes Ray listen on loopback only
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # actors with their own environment cannot use idle processes
    "RAY_memory_monitor_refresh_ms": "0",  # otherwise Ray may kill a worker because other processes use memory
    "RAY_task_events_report_interval_ms": "0",  # otherwise the GCS keeps a record of each of 100,000 calls
}
_PASSED_ON = re.compile(r"(NCCL|GLOO|PYTORCH|CUDA|HF|TRITON)_(?!VISIBLE_DEVICES|TOKEN)")
"""The variables of the driver that workers get, too. Ray sets CUDA_VISIBLE_DEVICES, and HF_TOKEN is a secret."""
_TOKENS = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
_CONNECTING = 15.0
"""Seconds to wait for a TCP connection to the cluster's address."""

Say: TypeAlias = Callable[[str], None]
"""Shows the progress of a start to a person."""


def environment_of_workers(on_cpu: bool) -> dict[str, str]:
    """The variables of a worker; the driver's own are stronger."""
    chosen = {name: value for name, value in os.environ.items() if _PASSED_ON.match(name)}
    return {**WORKER_ENVIRONMENT, **(CPU_ENVIRONMENT if on_cpu else {}), **chosen}


def connect(
    address: str | None = None, *, cpus: float = 1.0, timeout: float = 60.0, say: Say = lambda _: None, **init: Any
) -> Path | None:
    """Join the cluster at ``address`` or in ``RAY_ADDRESS``, else start one here with ``cpus`` (logical) CPUs or more.

    Returns the folder of a cluster that was started here. ``init`` are arguments of ``ray.init``.

    Raises:
        ExecutionError: the address does not answer within ``timeout`` seconds, or Ray does not start.
        ValueError: a field of ``runtime_env`` that Ray does not have.
    """
    shown = "ray.address=" if address else "RAY_ADDRESS="
    address = address or os.environ.get("RAY_ADDRESS") or None
    # The driver reports the error of the first rank that fails. Ray would also print the tracebacks of the others.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if address is None:
        for name, value in _DRIVER_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():
        if any(init.values()):
            log.warning("ray.init and ray.runtime_env are not used: this process has joined a cluster before")
        return None
    known = {*inspect.signature(ray.runtime_env.RuntimeEnv).parameters, *ray.runtime_env.RuntimeEnv.known_fields}
    if unknown := (init.get("runtime_env") or {}).keys() - known:
        raise ValueError(f"ray.runtime_env.{min(unknown)}: Ray has no such field")
    init = {"log_to_driver": False, "logging_level": logging.ERROR, **init}
    if address is None:
        say("ray: starting a cluster on this machine")
        return _begin(cpus, init)
    say(f"ray: joining the cluster at {address}, for at most {timeout:g} s")
    _join(address, shown + address, timeout, init)
    return None


def _begin(cpus: float, init: dict[str, Any]) -> Path:
    """Start a private cluster on this machine, next to any other clusters; returns its folder."""
    import ray
    from ray._private import ray_constants

    has_token = (Path.home() / ".ray" / "auth_token").exists() or bool(os.environ.keys() & _TOKENS)
    # RAY_AUTH_MODE=token alone does not mean that there is a token: child processes of a Ray program inherit it.
    if not has_token and os.environ.get("RAY_AUTH_MODE") != "disabled":
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # otherwise Ray writes one into the home directory
    # Ray read this variable when it was imported, before it was set above.
    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, False)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # Ray's processes outlive a dropped connection
    try:
        ray.init(
            address="local",  # Ray's file may name a cluster that has ended, or the cluster of another user
            **{"num_cpus": max(int(cpus) + 1, os.cpu_count() or 1), "include_dashboard": False, **init},
        )
    except Exception as error:  # on a busy machine Ray raises a plain Exception
        fix = "; set RAY_TMPDIR to a short path" if "AF_UNIX" in str(error) else ""
        raise ExecutionError(f"no cluster could be started on this machine: {_first_line(error)}{fix}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return Path(ray._private.worker._global_node.get_session_dir_path())


def _join(address: str, shown: str, timeout: float, init: dict[str, Any]) -> None:
    """Join a cluster within ``timeout`` seconds. Ray itself would try a wrong address for 15 minutes."""
    import ray

    other = "start one there by 'ray start --head'; without this setting the run starts its own"
    try:
        _check_listens(address, min(timeout, _CONNECTING))
    except (OSError, ValueError) as error:
        raise ExecutionError(f"{shown}: {_first_line(error)}; {other}") from None
    try:
        begun = partial(ray.init, address, **init)
        in_daemon(begun, Future()).result(timeout)  # in a thread, so that a timeout and Ctrl-C end the wait
    except TimeoutError:
        raise ExecutionError(f"{shown}: no answer from Ray within {timeout:g} s; {other}") from None
    except Exception as error:
        if "RAY_AUTH_MODE" not in os.environ:  # Ray sends its token to an address only if this is set
            other = f"if the cluster has a token, set RAY_AUTH_MODE=token; otherwise {other}"
        raise ExecutionError(f"{shown}: {_first_line(error)}; {other}") from error


def _check_listens(address: str, timeout: float) -> None:
    """Raise an OSError if nobody listens where Ray will look, which is not on loopback unless its variable is set."""
    from ray._private.services import canonicalize_bootstrap_address

    there = address if "://" in address else str(canonicalize_bootstrap_address(address))
    match = re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)/?", there)
    if match is None or (error := _error_at(match[1], match[2], timeout)) is None:
        return
    if there != address and _error_at("127.0.0.1", match[2], timeout) is None:  # auto, or a name of this machine
        raise OSError(f"the cluster at 127.0.0.1:{match[2]} is on loopback only: to join it, set {_LOOPBACK}=0")
    raise OSError(f"no Ray cluster is there ({error})")


def _error_at(host: str, port: str, timeout: float) -> Exception | None:
    """The error of a TCP connection; None if there is none."""
    try:
        socket.create_connection((host, int(port)), timeout).close()
    except (OSError, OverflowError) as error:
        return error
    return None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
