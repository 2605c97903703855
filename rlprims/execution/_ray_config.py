"""The settings of a cluster: its pools of workers, what each holds, and the checks that they fit together."""

from typing import Any, Literal

from pydantic import Field, model_validator

from rlprims.execution._config import _Config

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


_DECIDED = {"address": "use ray.address", "runtime_env": "use ray.runtime_env", "local_mode": "use execution: local"}
_DECIDED |= dict.fromkeys(("cpus", "say", "timeout"), "Ray has no such argument")
_OF_OWN_CLUSTER = {"num_cpus", "num_gpus", "resources", "labels", "object_store_memory", "include_dashboard"}
_SET_HERE = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING")


class PoolConfig(_Config):
    """Workers with their own placement group."""

    workers: int = Field(default=1, ge=1)
    cpus: float = Field(default=1.0, gt=0, description="of each worker")
    gpus: float = Field(default=0.0, ge=0, description="of each worker")
    placement: Placement = "PACK"


class RolesConfig(_Config):
    """The pool of each model. Models in one pool share its processes. The policy is trained in the pool ``main``."""

    reference: str = Field(default="main", description="pool of the reference, whose ranks hold it in shards")
    teacher: str = Field(default="main", description="pool of the teachers, whose ranks hold them in shards")
    critic: str = Field(default="main", description="pool of the critic")
    reward: str = Field(default="main", description="pool of the reward model, whole in each process")
    rollout: str = Field(
        default="main",
        description="pool of the engines, one for each of its workers; main: ray.rollout_workers, beside the training "
        "ranks",
    )


class RayConfig(_Config):
    """The cluster of ``execution: ray`` and its workers."""

    address: str | None = Field(
        default=None,
        description="of a running cluster, or auto; null: under ray job submit the cluster of the job, otherwise one "
        "is started on this machine",
    )
    init: dict[str, Any] = Field(
        default={}, description="other arguments of ray.init, such as {namespace: mine, log_to_driver: true}"
    )
    runtime_env: dict[str, Any] = Field(
        default={}, description="of all workers, with Ray's fields: {env_vars: {NAME: text}, working_dir: FOLDER}"
    )
    training_workers: int = Field(default=1, ge=1, description="FSDP2 ranks that share policy, reference and critic")
    rollout_workers: int = Field(default=1, ge=1, description="engines that sample")
    engine: Literal["vllm", "hf"] = Field(default="vllm", description="vllm, or hf: the sampler of execution: local")
    placement: Placement = Field(default="PACK", description="strategy of Ray's placement groups")
    cpus_per_worker: float = Field(default=1.0, gt=0, description="CPUs that Ray reserves for each worker")
    gpus_per_worker: float = Field(default=0.0, ge=0, description="below 1: workers share a device, two with 0.5")
    pools: dict[str, PoolConfig] = Field(
        default={},
        description="{NAME: {workers: 1, cpus: 1.0, gpus: 0.0, placement: PACK}}: placement groups besides main, "
        "which the settings above define; cpus and gpus are per worker",
    )
    roles: RolesConfig = RolesConfig()
    colocate: bool = Field(
        default=False, description="engine i has the same place and device as rank i, and sleeps while the rank trains"
    )
    sleep_level: Literal[1, 2] = Field(
        default=1, description="1: a sleeping engine keeps its weights on the CPU; 2: it drops them for a new sync"
    )
    weight_transfer: Literal["auto", "nccl", "ipc", "gloo"] = Field(
        default="auto",
        description="how whole weights go to the engines: nccl from GPU to GPU, ipc within a GPU, gloo through the "
        "CPU; auto: what fits the devices",
    )
    running_requests: Literal["keep", "recompute", "wait"] = Field(
        default="keep",
        description="responses that are being sampled when new weights come. keep: they continue with their old keys "
        "and values; recompute: these are computed again; wait: the new weights wait until the responses are complete",
    )
    kv_cache_bytes: int | None = Field(
        default=None, ge=1, description="of each engine; null: the engine decides, on a CPU half of the memory"
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="devices that share each vLLM engine's weights")
    enforce_eager: bool | None = Field(
        default=None, description="true: vLLM without CUDA graphs; null: with them if there is a GPU"
    )
    engine_options: dict[str, Any] = Field(default={}, description="other options of vLLM, as its EngineArgs name them")
    start_timeout: float = Field(
        default=300.0, gt=0, description="seconds in which no worker is placed, works or is ready"
    )
    call_timeout: float = Field(
        default=1800.0,
        gt=0,
        description="seconds after which an engine that does not answer counts as lost; one that is only slow answers",
    )
    training_timeout: float = Field(
        default=14400.0,
        gt=0,
        description="seconds for one call of the training ranks, such as an update or the log-probs of a batch; ranks "
        "that take longer count as lost",
    )
    heartbeat_timeout: float = Field(default=300.0, gt=0, description="seconds in which a busy rank answers a ping")
    max_replacements: int = Field(default=3, ge=0, description="lost rollout workers that are replaced in a run")
    mixed_precision: Literal["bfloat16"] | None = Field(
        default=None, description="dtype of the ranks' forward and backward, while the engines use model.dtype"
    )
    shard_over: int | None = Field(
        default=None,
        ge=1,
        description="ranks that share one copy of the weights; null: all. Several copies exchange only gradients",
    )
    training_tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="training ranks that divide the layers and compute the same rows together; it divides shard_over "
        "and the model's heads",
    )
    reduce_gradients: Literal["once", "every_micro_batch"] = Field(
        default="once",
        description="when gradients are summed over the ranks. once: for each update; each rank keeps whole gradients "
        "until then. every_micro_batch: more traffic, and each rank keeps only its shard",
    )
    activation_checkpointing: bool = Field(
        default=False, description="layers are computed again in the backward pass: less memory, more time"
    )
    cpu_offload: bool = Field(default=False, description="weights and optimizer are on the CPU between their uses")

    @model_validator(mode="after")
    def _placed(self) -> "RayConfig":
        roles = self.roles.model_dump()
        unknown = {role: pool for role, pool in roles.items() if pool not in self.all_pools}
        idle = sorted(set(self.pools) - set(roles.values()))
        if "main" in self.pools or unknown or idle:
            raise ValueError(
                f"ray.roles has the pools {sorted(set(roles.values()))}, ray.pools {sorted(self.pools)}: expected the "
                "same pools, and main only in ray.roles: training_workers and rollout_workers define it"
            )
        rollout = self.roles.rollout
        if rollout != "main" and list(roles.values()).count(rollout) > 1:
            raise ValueError(f"ray.roles: expected only engines in the pool {rollout}, got other models in it")
        for pool in sorted({"main", *roles.values()} - ({rollout} - {"main"})):
            count = self.training_workers if pool == "main" else self.pools[pool].workers
            if self.shard_over and count % self.shard_over:
                raise ValueError(
                    f"ray.shard_over={self.shard_over}: expected a number that divides the {count} ranks of the pool "
                    f"{pool}, got one that does not"
                )
            if (self.shard_over or count) % self.training_tensor_parallel:
                raise ValueError(
                    f"ray.training_tensor_parallel={self.training_tensor_parallel}: expected a number that divides the "
                    f"{self.shard_over or count} ranks of the pool {pool} that share the weights, got one that does not"
                )
        if self.engine == "hf" and (self.engine_options or self.tensor_parallel_size > 1):
            raise ValueError("ray.engine_options and ray.tensor_parallel_size are vLLM's: set ray.engine: vllm")
        gpus = self.all_pools[self.roles.rollout].gpus
        if gpus and self.tensor_parallel_size > 1 and gpus != self.tensor_parallel_size:
            raise ValueError(
                f"ray.tensor_parallel_size: expected engines with gpus: {self.tensor_parallel_size}, got {gpus:g}; use "
                "ray.pools and ray.roles.rollout, which give the engines their own pool"
            )
        if self.colocate and (self.roles.rollout != "main" or self.rollout_workers > self.training_workers):
            raise ValueError("ray.colocate: expected as many ranks as engines or more, and no pool for the engines")
        self._check_transfer()
        self._check_init()
        return self

    def _check_init(self) -> None:
        for name in self.init.keys() & (_DECIDED.keys() | (_OF_OWN_CLUSTER if self.address else ())):
            raise ValueError(f"ray.init.{name}: {_DECIDED.get(name, 'the cluster of ray.address runs already')}")
        for kind in ("cpus", "gpus"):
            needed = sum(pool.workers * getattr(pool, kind) for pool in self.all_pools.values())
            if self.init.get(f"num_{kind}", needed) < needed:
                raise ValueError(f"ray.init.num_{kind}: expected at least {needed:g}, for the workers of all pools")
        for name, value in self.runtime_env.get("env_vars", {}).items():
            if name in _SET_HERE or not isinstance(value, str):
                raise ValueError(f"ray.runtime_env.env_vars.{name}: expected a text, and no name of {_SET_HERE}")

    def _check_transfer(self) -> None:
        chosen = self.weight_transfer
        if chosen not in ("nccl", "ipc"):
            return
        if self.engine == "hf":
            raise ValueError(f"ray.weight_transfer={chosen}: expected ray.engine: vllm, got hf; use auto or gloo")
        if chosen == "ipc" and (not self.colocate or self.tensor_parallel_size > 1):
            raise ValueError(
                "ray.weight_transfer=ipc: expected each engine on the one device of its rank (ray.colocate: true, "
                f"tensor_parallel_size: 1), got colocate: {str(self.colocate).lower()}, tensor_parallel_size: "
                f"{self.tensor_parallel_size}; use nccl, auto or gloo"
            )
        if chosen == "nccl" and (self.colocate or not self.has_whole_devices):
            raise ValueError(
                "ray.weight_transfer=nccl: expected ranks and engines with whole devices of their own "
                "(ray.gpus_per_worker: 1, or pools with gpus; no ray.colocate), got some that share a device or have "
                "none; use ipc with ray.colocate, auto or gloo"
            )

    @property
    def has_whole_devices(self) -> bool:
        """Whether each rank of the pool main and each engine has a GPU, or several, of its own."""
        pools = self.all_pools
        return not self.colocate and pools["main"].gpus >= 1 and pools[self.roles.rollout].gpus >= 1

    @property
    def sharers(self) -> int:
        """The number of ranks of the pool main that share one copy of the weights."""
        return self.shard_over or self.training_workers

    @property
    def all_pools(self) -> dict[str, PoolConfig]:
        engines = self.rollout_workers if self.roles.rollout == "main" and not self.colocate else 0
        workers, cpus, gpus = self.training_workers + engines, self.cpus_per_worker, self.gpus_per_worker
        return {"main": PoolConfig(workers=workers, cpus=cpus, gpus=gpus, placement=self.placement), **self.pools}


def backend_of(cluster: RayConfig, device: str) -> str:
    """Return the backend for whole weights: ``ray.weight_transfer``; for ``auto`` the backend that fits the devices."""
    chosen = cluster.weight_transfer
    if chosen in ("nccl", "ipc") and device != "cuda":
        raise ValueError(f"ray.weight_transfer={chosen}: expected models on GPUs, got model.device {device}; use gloo")
    if chosen != "auto":
        return chosen
    if device != "cuda" or cluster.engine == "hf":
        return "gloo"
    if cluster.colocate:
        return "ipc" if cluster.tensor_parallel_size == 1 else "gloo"
    return "nccl" if cluster.has_whole_devices else "gloo"


_OF_A_DEVICE = 0.92
"""The share of a device's memory that vLLM takes by default."""
_OF_CONTEXTS = 0.01
"""The share that the CUDA contexts of an engine's own processes may take before it looks."""


def memory_options(free: int, total: int, *, gpus: float, colocate: bool) -> dict[str, float]:
    """vLLM's share of a device that others use too, of ``total`` bytes, of which ``free`` are free; {} of its own one.

    >>> memory_options(50 * 10**9, 80 * 10**9, gpus=0.5, colocate=False)
    {'gpu_memory_utilization': 0.46}
    """
    left = free / total - _OF_CONTEXTS
    if colocate:  # its rank has left the device, but for a context
        return {"gpu_memory_utilization": round(min(_OF_A_DEVICE, left), 3)}
    if not 0 < gpus < 1:
        return {}
    if gpus * _OF_A_DEVICE > left:
        raise ValueError(
            f"an engine with {gpus:g} of a device takes {gpus * _OF_A_DEVICE * total / 1e9:.1f} GB, and of "
            f"{total / 1e9:.1f} GB only {left * total / 1e9:.1f} are free beside the ranks: set ray.colocate: true, or "
            f"ray.engine_options: {{gpu_memory_utilization: {max(left, 0):.2f}}} if that is enough for the model"
        )
    return {"gpu_memory_utilization": round(gpus * _OF_A_DEVICE, 3)}
