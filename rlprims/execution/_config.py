"""The settings of models, optimizers, sampling and profiles. Those of a cluster are in ``_ray_config``."""

from typing import Annotated, Literal

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
