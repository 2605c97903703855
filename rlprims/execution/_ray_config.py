"""The settings of a cluster: its pools of workers, what each holds, and the checks that they fit together."""

from typing import Any, Literal

from pydantic import Field, model_validator

from rlprims.execution._config import ModelConfig, _Config

Placement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class PoolConfig(_Config):
    """Workers with their own placement group."""

    workers: int = Field(default=1, ge=1)
    cpus: float = Field(default=1.0, gt=0, description="of each worker")
    gpus: float = Field(default=0.0, ge=0, description="of each worker")
    placement: Placement = "PACK"


class RolesConfig(_Config):
    """The pool of each model. Models in one pool share its processes. The policy is trained in the pool ``main``."""

    reference: str = Field(default="main", description="pool of the reference")
    teacher: str = Field(default="main", description="pool of the teacher")
    critic: str = Field(default="main", description="pool of the critic")
    reward: str = Field(default="main", description="pool of the reward model")
    rollout: str = Field(
        default="main", description="pool of the engines, each a process; main: beside the training workers"
    )


class RayConfig(_Config):
    """The cluster of ``execution: ray`` and its workers."""

    address: str | None = Field(
        default=None,
        description="of a running cluster, or auto; null: that of the job, otherwise a new one on this machine",
    )
    training_workers: int = Field(
        default=1, ge=1, description="ranks that share the weights of policy, reference and critic"
    )
    rollout_workers: int = Field(default=1, ge=1, description="engines that sample")
    engine: Literal["vllm", "hf"] = Field(default="vllm", description="vllm, or hf: the forward pass of transformers")
    placement: Placement = "PACK"
    cpus_per_worker: float = Field(default=1.0, gt=0)
    gpus_per_worker: float = Field(default=0.0, ge=0, description="below 1: two workers with 0.5 share a device")
    pools: dict[str, PoolConfig] = Field(
        default={}, description="pools in addition to main, which the settings above define"
    )
    roles: RolesConfig = RolesConfig()
    colocate: bool = Field(
        default=False, description="engine i shares the devices of rank i, and sleeps during training"
    )
    sleep_level: Literal[1, 2] = Field(
        default=1, description="1: a sleeping engine keeps its weights on the CPU; 2: it drops them"
    )
    weight_transfer: Literal["auto", "nccl", "ipc", "gloo"] = Field(
        default="auto",
        description="how whole weights go to the engines: nccl from GPU to GPU, ipc within a GPU (colocate), gloo "
        "through the CPU; auto: what fits the devices",
    )
    running_requests: Literal["keep", "recompute", "wait"] = Field(
        default="keep",
        description="responses that are being sampled when new weights come (staleness above 1). keep: they continue "
        "with their old keys and values; recompute: these are computed again with the new weights; wait: the new "
        "weights wait until the responses are complete",
    )
    kv_cache_bytes: int | None = Field(default=None, ge=1, description="of each engine; null: the engine decides")
    tensor_parallel_size: int = Field(default=1, ge=1, description="devices that share the weights of a vLLM engine")
    teacher_engine: Literal["hf", "vllm"] = Field(
        default="hf",
        description="hf: the teachers are on ranks; vllm: each worker of the teacher's pool is an engine that scores",
    )
    teacher_tensor_parallel_size: int = Field(
        default=1, ge=1, description="devices that share the weights of a vLLM engine of the teacher"
    )
    enforce_eager: bool | None = Field(default=None, description="vLLM without CUDA graphs; null: with them on a GPU")
    engine_options: dict[str, Any] = Field(
        default={}, description="further options of vLLM, by the names of its EngineArgs"
    )
    start_timeout: float = Field(default=300.0, gt=0, description="seconds until all workers are ready")
    call_timeout: float = Field(
        default=1800.0,
        gt=0,
        description="seconds after which an engine that does not answer counts as lost; one that is only slow answers",
    )
    training_timeout: float = Field(
        default=14400.0,
        gt=0,
        description="seconds for one call of the training ranks, such as an update or the log-probs of a batch. Ranks "
        "that take longer count as lost, because one that is slow cannot be told from one that hangs; the death of a "
        "rank is noticed at once",
    )
    max_replacements: int = Field(default=3, ge=0, description="lost rollout workers that are replaced in a run")
    mixed_precision: Literal["bfloat16"] | None = Field(
        default=None, description="of the ranks' forward and backward, where the engines keep dtype"
    )
    shard_over: int | None = Field(
        default=None,
        ge=1,
        description="ranks that share one copy of the weights; null: all. With fewer there are several copies, such as "
        "one in each node, which exchange only gradients (hybrid sharding)",
    )
    training_tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="ranks that compute the same rows together, each with a part of every layer (tensor parallelism); "
        "it divides shard_over, and the model's heads",
    )
    reduce_gradients: Literal["once", "every_micro_batch"] = Field(
        default="once",
        description="once: for each update, with whole gradients on each rank until then; every_micro_batch: with only "
        "a shard of the gradients on each rank",
    )
    activation_checkpointing: bool = Field(
        default=False, description="recompute layers in the backward pass: less memory, slower"
    )
    cpu_offload: bool = Field(default=False, description="keep weights and optimizer on the CPU between their uses")

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
        if self.roles.rollout != "main" and list(roles.values()).count(self.roles.rollout) > 1:
            raise ValueError(
                f"ray.roles: expected only engines in the pool {self.roles.rollout}, got other models in it"
            )
        engines = {self.roles.rollout, *([self.roles.teacher] if self.teacher_engine == "vllm" else [])} - {"main"}
        for pool in sorted({"main", *roles.values()} - engines):
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
        self._check_teacher()
        return self

    def _check_teacher(self) -> None:
        size, pool = self.teacher_tensor_parallel_size, self.roles.teacher
        if self.teacher_engine == "hf":
            if size > 1:
                raise ValueError("ray.teacher_tensor_parallel_size is vLLM's: set ray.teacher_engine: vllm")
            return
        if pool == "main" or list(self.roles.model_dump().values()).count(pool) > 1:
            raise ValueError(
                f"ray.teacher_engine=vllm: expected a pool with no other model than the teacher, got {pool}; set "
                "ray.pools: {teacher: {workers: 1}} and ray.roles.teacher: teacher"
            )
        gpus = self.pools[pool].gpus
        if gpus != size and (gpus > 1 or (gpus and size > 1)):
            raise ValueError(
                f"ray.pools.{pool}: expected workers with gpus: {size}, as ray.teacher_tensor_parallel_size says, got "
                f"{gpus:g}; set both to the same number"
            )

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
        main = PoolConfig(
            workers=self.training_workers + engines,
            cpus=self.cpus_per_worker,
            gpus=self.gpus_per_worker,
            placement=self.placement,
        )
        return {"main": main, **self.pools}


def backend_of(cluster: RayConfig, device: str) -> str:
    """Return the backend for whole weights: ``ray.weight_transfer``; for ``auto`` the backend that fits the devices."""
    chosen = cluster.weight_transfer
    if chosen in ("nccl", "ipc") and device != "cuda":
        raise ValueError(
            f"ray.weight_transfer={chosen}: expected models on GPUs, got model.device {device}; use auto or gloo"
        )
    if chosen != "auto":
        return chosen
    if device != "cuda" or cluster.engine == "hf":
        return "gloo"
    if cluster.colocate:
        return "ipc" if cluster.tensor_parallel_size == 1 else "gloo"
    return "nccl" if cluster.has_whole_devices else "gloo"


def check_teacher_engine(
    cluster: RayConfig, model: ModelConfig, *, temperature: float, truncates: bool = False
) -> None:
    """Check what ``ray.teacher_engine: vllm`` needs of the other settings, for an algorithm that reads a teacher.

    vLLM scores a text over its whole vocabulary at temperature 1, with one frozen model.
    """
    if cluster.teacher_engine == "hf":
        return
    for setting, wanted, got in (
        ("sampling.temperature", "1", None if temperature == 1 else f"{temperature:g}"),
        ("sampling", "no top_k, top_p or min_p", "truncated sampling" if truncates else None),
        ("model.teacher", "one model", "several" if isinstance(model.teacher, dict) else None),
        ("model.teacher_follows", "a frozen teacher", "one that follows the policy" if model.teacher_follows else None),
    ):
        if got is not None:
            raise ValueError(
                f"{setting}: with ray.teacher_engine: vllm expected {wanted}, got {got}; change it, or use "
                "ray.teacher_engine: hf"
            )
