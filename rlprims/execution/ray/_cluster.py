"""A cluster to run on: started on this machine, or joined; and room reserved in it."""

import os
import time
from typing import Any

from rlprims.execution._config import PoolConfig
from rlprims.execution._protocol import ExecutionError

WORKER_ENVIRONMENT = {
    # The engine in the worker's own process: no children to orphan, and a schedule that repeats.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ENVIRONMENT = {
    # On a CPU: no C++ compiler behind the engine's first answer, one thread each, and nothing beyond loopback.
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
_DRIVER_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what makes Ray listen on loopback alone
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # else any process of the machine can get a worker killed
}


def connect(address: str | None, *, cpus: float) -> None:
    """Join the cluster at ``address``, or that of the job which this is, or start one of this machine, with at least so
    many (logical) CPUs."""
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        for name, value in _DRIVER_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    import ray
    from ray._private import ray_constants

    if ray.is_initialized():
        return
    if address is None:
        # Ray read it when it was imported, which was before this.
        ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, False)
        ray.init(num_cpus=max(int(cpus) + 1, os.cpu_count() or 1), include_dashboard=False, log_to_driver=False)
    else:
        ray.init(address=address, log_to_driver=False)


def reserve(pool: PoolConfig, *, timeout: float) -> Any:
    """A placement group with a bundle for each worker.

    Raises:
        ExecutionError: the cluster has no room for it; says what was asked for and what there is.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundle = {"CPU": pool.cpus, **({"GPU": pool.gpus} if pool.gpus else {})}
    group = placement_group([bundle] * pool.workers, strategy=pool.placement)
    try:
        if not _placed(group, timeout):  # an impossible group waits forever and raises nothing
            raise ExecutionError(
                f"no room for {pool.workers} workers of {bundle} ({pool.placement}) within {timeout:g} s; the cluster "
                f"has {ray.cluster_resources()}, of which {ray.available_resources()} are free"
            )
    except BaseException:  # also of who is tired of waiting: it would get its room yet, and keep it
        remove_placement_group(group)
        raise
    return group


def _placed(group: Any, timeout: float) -> bool:
    """Whether it has its room in time; a wait inside Ray would not hear a Ctrl-C until its end."""
    end = time.monotonic() + timeout
    while not group.wait(min(1.0, timeout)):
        if time.monotonic() >= end:
            return False
    return True
