"""What an execution layer is told, whatever it runs on."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampling(_Config):
    """How responses are sampled; the names are Hugging Face's."""

    max_new_tokens: int = Field(512, ge=1, description="response length limit, tokens")
    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus; below 1 the sampler is not the policy that is trained")
    top_k: int = Field(0, ge=0, description="0: all tokens")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="texts that end a response, beside the end-of-sequence token"
    )

    def greedy(self) -> "Sampling":
        return self.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0})


class ModelConfig(_Config):
    """Which weights, and how they are computed with."""

    path: str = Field(description="a Hugging Face causal language model: a directory, or a name of the hub")
    reference: str | None = Field(None, description="frozen reference; null: the model as it is at the start")
    critic: str | None = Field(None, description="what the critic starts from; null: the model, with a new value head")
    reward: str | None = Field(None, description="a sequence classifier of one label, frozen; null: no reward model")
    reward_template: str | None = Field(
        None,
        description="what it reads: null: the policy's tokens; chat: its own chat template; or text with {question} "
        "and {response} in it",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = Field("auto", description="auto: cuda if there is one, else cpu")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    max_tokens_per_micro_batch: int = Field(16384, ge=1, description="rows x longest row of one forward and backward")
    max_rows_per_generation: int = Field(512, ge=1, description="responses sampled at once")

    @field_validator("reward_template")
    @classmethod
    def _names_the_response(cls, template: str | None) -> str | None:
        if template is not None and template != "chat" and "{response}" not in template:
            raise ValueError("write chat, or text with {question} and {response} in it")
        return template


class RayConfig(_Config):
    """The cluster that ``execution: ray`` runs on, and who does what there."""

    address: str | None = Field(None, description="of a running cluster, or auto; null: start one on this machine")
    training_workers: int = Field(1, ge=1, description="ranks that share the policy, its reference and its critic")
    rollout_workers: int = Field(1, ge=1, description="engines that sample")
    engine: Literal["vllm", "hf"] = Field("vllm", description="what samples: vLLM, or the model's own forward")
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    cpus_per_worker: float = Field(1.0, gt=0)
    gpus_per_worker: float = Field(0.0, ge=0, description="below 1 colocates: two workers with 0.5 share a device")
    kv_cache_bytes: int | None = Field(None, ge=1, description="of each engine; null: the engine decides")
    start_timeout: float = Field(300.0, gt=0, description="seconds until every worker is placed and ready")
    call_timeout: float = Field(1800.0, gt=0, description="seconds until a worker that does not answer is given up")
    max_replacements: int = Field(3, ge=0, description="of rollout workers that died, over the run")
    mixed_precision: Literal["bfloat16"] | None = Field(None, description="of forward and backward; weights keep dtype")
    activation_checkpointing: bool = Field(False, description="recompute layers in the backward: less memory, slower")
    cpu_offload: bool = Field(False, description="weights and optimizer live on the CPU between their uses")


class OptimizerConfig(_Config):
    """AdamW with a warm-up and a decay of the learning rate."""

    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    warmup_steps: int = Field(0, ge=0, description="optimizer steps from 0 to lr")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_lr_ratio: float = Field(0.0, ge=0, le=1, description="lr at the last step / lr, of linear and cosine")
    max_grad_norm: float = Field(1.0, gt=0)
