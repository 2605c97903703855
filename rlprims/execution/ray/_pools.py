"""Pools of workers. A pool has a placement group, and its workers hold the models of the pool's roles."""

from contextlib import ExitStack
from typing import Any

from ray.util.placement_group import remove_placement_group

from rlprims.algorithms import Algorithm
from rlprims.execution._config import ModelConfig, OptimizerConfig, RayConfig
from rlprims.execution.hf._models import device_of
from rlprims.execution.ray._cluster import CPU_ENVIRONMENT, WORKER_ENVIRONMENT, bundles_of, reserve
from rlprims.execution.ray._teacher_worker import TeacherWorker
from rlprims.execution.ray._training_worker import TrainingWorker
from rlprims.execution.ray._worker_group import Pending, WorkerGroup

Place = dict[str, Any]
"""The arguments with which the workers of a pool start: placement group and bundles, CPUs, GPUs, environment."""


def reserve_pools(cluster: RayConfig, model: ModelConfig, held: ExitStack) -> dict[str, Place]:
    """Reserve a placement group for every pool; returns the start arguments of the pools' workers, by pool.

    ``held`` removes the groups when it is closed.
    """
    places = {}
    on_cpu = device_of(model).type == "cpu"
    for name, pool in cluster.all_pools.items():
        room = reserve(pool, timeout=cluster.start_timeout)
        held.callback(remove_placement_group, room)
        environment = {**WORKER_ENVIRONMENT, **(CPU_ENVIRONMENT if on_cpu and not pool.gpus else {})}
        share = 0.5 if cluster.colocate and name == "main" else 1.0  # a rank and an engine share a bundle
        places[name] = {
            "placement_group": room,
            "bundles": bundles_of(room, pool),
            "cpus": pool.cpus * share,
            "gpus": pool.gpus * share,
            "environment": environment,
        }
    return places


def start_training(
    cluster: RayConfig,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    options: dict[str, Any],
    places: dict[str, Place],
    held: ExitStack,
) -> tuple[dict[str, WorkerGroup], int]:
    """Start the ranks of every pool that has a model; returns them by pool, and the policy's context window."""
    of_engines = {"rollout", *(["teacher"] if cluster.teacher_engine == "vllm" else [])}
    roles = {"actor": "main", **cluster.roles.model_dump(exclude=of_engines)}
    groups, building = dict[str, WorkerGroup](), {}
    for name in dict.fromkeys(roles.values()):
        count = cluster.training_workers if name == "main" else cluster.pools[name].workers
        shown = "training" if name == "main" else name
        groups[name] = WorkerGroup(
            TrainingWorker,
            count,
            name=shown,
            timeout=cluster.training_timeout,
            same_rows=cluster.training_tensor_parallel,
            **places[name],
        )
        held.callback(groups[name].stop)
    for name, group in groups.items():
        address = group.call(TrainingWorker.address).result(cluster.start_timeout)
        mine = [role for role, pool in roles.items() if pool == name]
        building[name] = group.call(TrainingWorker.build, address, cluster, model, optimizer, options, mine)
    windows = {name: pending.result(cluster.start_timeout)[0] for name, pending in building.items()}
    return groups, windows["main"]


def start_teacher(
    cluster: RayConfig, model: ModelConfig, algorithm: Algorithm, places: dict[str, Place], held: ExitStack
) -> Pending[Any]:
    """Start the engines of the teacher's pool; returns the pending call that loads them."""
    name = cluster.roles.teacher
    count, timeout = cluster.pools[name].workers, cluster.call_timeout
    group = WorkerGroup(TeacherWorker, count, name=name, timeout=timeout, **places[name])
    held.callback(group.stop)
    return group.call(TeacherWorker.build, cluster, model, algorithm)
