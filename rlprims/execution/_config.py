"""The settings of an execution layer."""

from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampling(_Config):
    """Settings of the sampling, with the names of Hugging Face."""

    max_new_tokens: int = Field(default=512, ge=1, description="response length limit, tokens")
    temperature: float = Field(default=1.0, ge=0, description="0 is greedy")
    top_k: int = Field(default=0, ge=0, description="tokens are drawn from this many of the likeliest ones; 0: all")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="nucleus: the smallest set of likeliest tokens with this sum of probabilities",
    )
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="tokens with at least this share of the largest probability; 0: all"
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="texts that end a response, in addition to the end-of-sequence token"
    )

    def greedy(self) -> "Sampling":
        return self.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0})

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary. The sets are then recorded with the responses."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class LoraConfig(_Config):
    """Low-rank adapters that are trained instead of the weights: y = W x + (alpha / rank) B A x.

    They have no dropout, because a token must have the same log-prob in sampling and in training.
    """

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1, description="the factor of B A x is alpha / rank")
    rank_stabilized: bool = Field(default=False, description="the factor is alpha / sqrt(rank) instead")
    target_modules: Literal["all-linear"] | tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default="all-linear", description="or names of linear layers, such as [q_proj, v_proj]; never embedding or head"
    )
    seed: int = Field(default=0, description="seed of A; B begins at 0, so that the first policy is the model itself")
    sync: Literal["merged", "adapter"] = Field(
        default="merged",
        description="what engines receive: merged: whole weights with the adapters added; adapter: the adapters only",
    )


class FollowConfig(_Config):
    """Frozen weights that follow the policy: weights += rate * (policy - weights), see controllers.Ema."""

    rate: float = Field(default=0.05, gt=0, le=1, description="1: the weights are copied")
    every: int = Field(default=1, ge=1, description="optimizer steps of the policy between two such updates")


class ModelConfig(_Config):
    """The models, and how they are computed."""

    path: str = Field(description="a Hugging Face causal language model: a directory, or a name of the hub")
    reference: str | None = Field(default=None, description="frozen reference; null: the model at the start")
    reference_follows: FollowConfig | None = Field(
        default=None, description="the reference follows the policy; null: it is frozen"
    )
    teacher: str | dict[str, str] | None = Field(
        default=None,
        description="teacher for distillation: a model with the same vocabulary; {name: model}: several, of which "
        "data.teacher names one for each row; null: the model at the start",
    )
    teacher_follows: FollowConfig | None = Field(
        default=None, description="the teacher follows the policy; null: it is frozen"
    )
    critic: str | None = Field(
        default=None, description="model from which the critic starts; null: the policy's, with a new value head"
    )
    reward: str | None = Field(
        default=None, description="frozen sequence classifier with one label; null: no reward model"
    )
    reward_template: str | None = Field(
        default=None,
        description="input of the reward model. null: the policy's tokens; chat: its own chat template; or text with "
        "{question} and {response} in it",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="of forward and backward passes, and of the sampler; trained weights are float32"
    )
    lora: LoraConfig | None = Field(default=None, description="adapters that are trained instead of the weights")
    device: str = Field(default="auto", description="auto: cuda if there is one, else cpu")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    packing: bool = Field(
        default=True,
        description="policy and reference compute a micro-batch without padding, and a shared prompt once; needs sdpa",
    )
    fused_head: bool = Field(
        default=False,
        description="the logits of a micro-batch are computed in parts: less memory with a large vocabulary",
    )
    max_tokens_per_micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="tokens of one forward and backward pass; null: 16384, or the longest row if that is longer",
    )
    replay_routes: bool = Field(
        default=False,
        description="mixtures of experts: the policy is trained with the experts that the sampler used for each token",
    )
    max_rows_per_generation: int = Field(default=512, ge=1, description="responses that are sampled at the same time")
    peak_tflops: float | None = Field(
        default=None, gt=0, description="peak rate of a device, for mfu; null: from a table of GPUs, or measured"
    )

    @property
    def engine_lora(self) -> LoraConfig | None:
        """The adapters that an engine holds beside the model; None: it gets whole weights."""
        return self.lora if self.lora is not None and self.lora.sync == "adapter" else None

    @property
    def teachers(self) -> dict[str, str]:
        """The teachers' models by name; a single teacher has the name \"\"."""
        return self.teacher if isinstance(self.teacher, dict) else {"": self.teacher or self.path}

    @model_validator(mode="after")
    def _some_follow(self) -> "ModelConfig":
        for role, follows in (("reference", self.reference_follows), ("teacher", self.teacher_follows)):
            if follows is not None and self.lora is not None:
                raise ValueError(
                    f"model.{role}_follows needs whole weights, and model.lora trains adapters: leave one out"
                )
        if self.teacher_follows is not None and isinstance(self.teacher, dict):
            raise ValueError("model.teacher_follows: expected a single teacher, got several: leave it out")
        if self.teacher == {}:
            raise ValueError("model.teacher: expected null, a model, or {name: model}, got {}")
        return self

    @field_validator("device")
    @classmethod
    def _names_a_device(cls, device: str) -> str:
        if device != "auto":
            try:
                torch.device(device)
            except RuntimeError as error:
                raise ValueError(f"write auto, cpu, cuda or cuda:0 ({str(error).splitlines()[0]})") from None
        return device

    @field_validator("reward_template")
    @classmethod
    def _names_the_response(cls, template: str | None) -> str | None:
        if template is not None and template != "chat" and "{response}" not in template:
            raise ValueError("write chat, or text with {question} and {response} in it")
        return template

    @model_validator(mode="after")
    def _packing_needs_sdpa(self) -> "ModelConfig":
        if self.packing and self.attention != "sdpa":
            raise ValueError(f"packing: expected attention: sdpa, got {self.attention}. Set packing: false")
        return self


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
    """Return the backend for whole weights: ``ray.weight_transfer``; for ``auto`` the backend that fits the devices.

    Raises:
        ValueError: the setting requires GPUs, and the models are on a CPU.
    """
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

    Raises:
        ValueError: the teacher's log-probs would not be those of the sampler's distribution, there are several
            teachers, or the teacher follows the policy.
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


class ProfileConfig(_Config):
    """The steps that torch's profiler records, in every process."""

    steps: tuple[int, ...] = Field(default=(), description="steps; empty: no profile")
    shapes: bool = Field(default=False, description="record the operators' input shapes")
    memory: bool = Field(default=False, description="record allocations")
    stacks: bool = Field(default=False, description="record the Python stack of each operator: slow")


class OptimizerConfig(_Config):
    """AdamW, or Muon for the matrices, with a warm-up and a decay of the learning rate."""

    name: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon: torch.optim.Muon for the matrices of the layers, AdamW for the other weights",
    )
    lr: float = Field(default=1e-6, gt=0)
    lr_of: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="learning rates of weights whose name has this part; the first match counts"
    )
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps from 0 to lr")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="lr of the last step / lr, for linear and cosine"
    )
    max_grad_norm: float = Field(default=1.0, gt=0)
