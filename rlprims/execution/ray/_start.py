"""The start of an execution on a cluster: placement groups for the pools, and the workers of each."""

import math
from contextlib import ExitStack
from typing import Any

from rlprims.execution import ModelConfig, OptimizerConfig, RayConfig, RunNeeds
from rlprims.execution._ray_config import backend_of
from rlprims.execution.hf._models import device_of
from rlprims.execution.ray._cluster import Say, environment_of_workers
from rlprims.execution.ray._engine_workers import RolloutWorker
from rlprims.execution.ray._pool import Pool
from rlprims.execution.ray._rollouts import Adapters, Delivery, Rollouts, Wire
from rlprims.execution.ray._training_worker import TrainingWorker
from rlprims.execution.ray._worker_group import WorkerGroup


def start_workers(
    cluster: RayConfig,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    run: RunNeeds,
    held: ExitStack,
    tokenizer: Any,
    say: Say,
) -> tuple[dict[str, WorkerGroup], Rollouts, int]:
    """Start all workers: the ranks by pool, and engines; and the policy's context window. ``held`` stops them."""
    backend = backend_of(cluster, device_of(model).type)
    places = reserve_pools(cluster, model, held)
    engines = cluster.roles.rollout
    count = cluster.rollout_workers if engines == "main" else cluster.pools[engines].workers
    say(f"ray: loading the models in {cluster.training_workers} ranks and {count} engines ({cluster.engine})")
    before = cluster.training_workers if engines == "main" and not cluster.colocate else 0

    def process(rank: int) -> Any:
        return places[engines].start(RolloutWorker, before + rank, before + count)

    # All processes start at once: imports take seconds. The ranks load first, because an engine reserves free memory.
    begun = [process(rank) for rank in reversed(range(count))]
    pools, window = start_training(cluster, model, optimizer, run, places, held)
    if cluster.colocate:
        pools["main"].call(TrainingWorker.offload).result()

    def start(rank: int) -> tuple[Any, Any]:
        worker = begun.pop() if begun else process(rank)
        return worker, worker.build.remote(cluster, model, tokenizer, window, backend)

    delivery: Delivery = Adapters(pools["main"])
    if model.engine_lora is None:  # in the dtype of the engine: vLLM uses mixed_precision, ``hf`` always model.dtype
        dtype = (cluster.mixed_precision if cluster.engine == "vllm" else None) or model.dtype
        delivery = Wire(pools["main"], cluster.tensor_parallel_size, dtype, backend)
    rollouts = Rollouts(start, count, cluster, delivery, rows=model.max_rows_per_generation)
    held.callback(rollouts.stop)
    return pools, rollouts, window


def reserve_pools(cluster: RayConfig, model: ModelConfig, held: ExitStack) -> dict[str, Pool]:
    """Reserve a placement group for every pool, which ``held`` removes; returns where each pool's workers start."""
    places = {}
    on_cpu = device_of(model).type == "cpu"
    for name, pool in cluster.all_pools.items():
        share = 0.5 if cluster.colocate and name == "main" else 1.0  # a rank and an engine share a bundle
        places[name] = Pool(pool, share=share, timeout=cluster.start_timeout)
        held.callback(places[name].remove)
        variables = environment_of_workers(on_cpu and not pool.gpus)
        places[name].environment = variables | cluster.runtime_env.get("env_vars", {})
    return places


def start_training(
    cluster: RayConfig,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    run: RunNeeds,
    places: dict[str, Pool],
    held: ExitStack,
) -> tuple[dict[str, WorkerGroup], int]:
    """Start the ranks of every pool that has a model; returns them by pool, and the policy's context window."""
    roles = {"actor": "main", **cluster.roles.model_dump(exclude={"rollout"})}
    groups, building = dict[str, WorkerGroup](), {}
    timeout, same_rows = cluster.training_timeout, cluster.training_tensor_parallel
    for name in dict.fromkeys(roles.values()):
        count = cluster.training_workers if name == "main" else cluster.pools[name].workers
        how: Any = {"name": "training" if name == "main" else name, "timeout": timeout, "same_rows": same_rows}
        groups[name] = WorkerGroup(TrainingWorker, places[name], size=count, **how)
        groups[name].heartbeat = cluster.heartbeat_timeout
        held.callback(groups[name].stop)
    for name, group in groups.items():
        address = group.call(TrainingWorker.address).result(math.inf)
        mine = [role for role, pool in roles.items() if pool == name]
        building[name] = group.call(TrainingWorker.build, address, cluster, model, optimizer, run, mine)
    windows = {name: pending.result(math.inf)[0] for name, pending in building.items()}
    return groups, windows["main"]
