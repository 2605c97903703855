"""The settings of models, optimizers, sampling and profiles. Those of a cluster are in ``_ray_config``."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rlprims._storage import local_copy
from rlprims.algorithms import BoundFunction

Text: TypeAlias = Annotated[str, Field(min_length=1)]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampling(_Config):
    """Settings of the sampling, with the names of Hugging Face."""

    max_new_tokens: int = Field(default=512, ge=1, description="limit of the response length, tokens")
    temperature: float = Field(default=1.0, ge=0, description="0 is greedy")
    top_k: int = Field(default=0, ge=0, description="number of the likeliest tokens that are kept; 0: all")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="nucleus: the smallest number of the likeliest tokens whose probabilities reach this sum",
    )
    min_p: float = Field(default=0.0, ge=0, le=1, description="least share of the largest probability; 0: all tokens")
    stop: tuple[Text, ...] = Field(default=(), description="texts that end a response, besides the end token")
    min_new_tokens: int = Field(default=0, ge=0, description="tokens before an end token or a stop text")
    ignore_eos: bool = Field(default=False, description="true: no end token ends a response, only limit or stop text")
    bad_words: tuple[Text, ...] = Field(default=(), description="texts that are not drawn, also after a space")
    structured: dict[Literal["json", "regex", "grammar"], Any] | None = Field(
        default=None,
        min_length=1,
        max_length=1,
        description="form of a response: {json: schema}, {regex: ...} or {grammar: ...} in Lark's notation",
    )
    thinking_budget: int | None = Field(default=None, ge=0, description="tokens of thinking, which ends then")
    thinking_marks: tuple[Text, Text] = Field(default=("<think>", "</think>"), description="begin and end of thinking")
    logits_processors: tuple[BoundFunction, ...] = Field(default=(), description="functions of the tokens and logits")
    repetition_penalty: float = Field(default=1.0, gt=0, description="only of evaluations, as the next two")
    presence_penalty: float = Field(default=0.0, description="taken from the logits of the response's tokens")
    frequency_penalty: float = Field(default=0.0, description="the same, times their number")

    @model_validator(mode="after")
    def _fits(self) -> "Sampling":
        least, limit = self.min_new_tokens, self.max_new_tokens
        if least > limit or (least and self.ignore_eos):
            need = f"at most max_new_tokens={limit}, and no ignore_eos, with which no token ends a response"
            raise ValueError(f"min_new_tokens={least}: expected {need}")
        more = least or self.ignore_eos or self.bad_words or self.thinking_budget is not None or self.logits_processors
        if missing := [fn.path for fn in self.logits_processors if fn.unbound]:
            raise ValueError(f"logits_processors: {missing[0]} needs values: write {{fn: ..., name: value}}")
        if self.structured is not None and more:
            others = "min_new_tokens, ignore_eos, bad_words, thinking_budget and logits_processors"
            raise ValueError(f"structured says alone what may follow: leave out {others}")
        return self

    def greedy(self) -> "Sampling":
        return self.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0})

    @property
    def filters(self) -> bool:
        """Whether likely tokens are kept: top-k, top-p, min-p."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary. The sets are then recorded with the responses."""
        masks = self.min_new_tokens > 0 or self.bad_words or self.structured or self.logits_processors
        return self.filters or (self.temperature > 0 and bool(masks))

    @property
    def penalizes(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


class EvaluatedSampling(Sampling):
    """Sampling of responses that nobody trains on: its processors may change the logits."""


class LoraConfig(_Config):
    """Low-rank adapters that are trained instead of the weights: y = W x + (alpha / rank) B A x.

    They have no dropout, because a token must have the same log-prob in sampling and in training.
    """

    rank: int = Field(default=16, ge=1, description="rank of the adapters' product B A")
    alpha: int = Field(default=32, ge=1, description="the adapters' output is multiplied by alpha / rank")
    rank_stabilized: bool = Field(default=False, description="true: the factor is alpha / sqrt(rank)")
    target_modules: Literal["all-linear"] | tuple[Text, ...] = Field(
        default="all-linear",
        description="all-linear, or names of linear layers, such as [q_proj, v_proj]; embedding and head are not "
        "possible",
    )
    seed: int = Field(default=0, description="seed of the initial A; B begins with 0, so the first policy is the model")
    sync: Literal["merged", "adapter"] = Field(
        default="merged",
        description="weights that engines get. merged: whole weights with the adapters added; adapter: only the "
        "adapters",
    )


class FollowConfig(_Config):
    """Frozen weights that follow the policy: weights += rate * (policy - weights), see controllers.Ema."""

    rate: float = Field(default=0.05, gt=0, le=1, description="1: the weights are copied")
    every: int = Field(default=1, ge=1, description="optimizer steps of the policy between two such updates")


class ModelConfig(_Config):
    """The models, and how they are computed."""

    path: str = Field(description="a Hugging Face causal language model: a directory, a url, or a name of the hub")
    reference: str | None = Field(default=None, description="frozen reference; null: the initial model")
    reference_follows: FollowConfig | None = Field(
        default=None,
        description="the reference moves after the policy (controllers.Ema); {rate: 1.0, every: 100} copies the "
        "policy every 100 optimizer steps. Not with model.lora, and only with execution: local",
    )
    teacher: str | dict[str, str] | None = Field(
        default=None,
        description="teacher for distillation, a model with the same vocabulary; {name: model}: several, and "
        "data.teacher names one for each row; http://...: a server, such as vllm serve; null: the initial model",
    )
    teacher_follows: FollowConfig | None = Field(
        default=None,
        description="the teacher moves after the policy, such as {rate: 0.05, every: 1}; limits as for "
        "reference_follows",
    )
    critic: str | None = Field(default=None, description="first weights of the critic; null: the model, a new head")
    reward: str | None = Field(default=None, description="frozen sequence classifier with one label; null: none")
    reward_template: str | None = Field(
        default=None,
        description="input of the reward model. null: the policy's tokens; chat: its own chat template; or text with "
        "{question} and {response} in it",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="of forward, backward and the sampler; trained weights are kept in float32"
    )
    lora: LoraConfig | None = Field(
        default=None, description="adapters that are trained instead of the weights; {}: with the defaults"
    )
    vision: Literal["frozen", "trained", "none"] = Field(
        default="frozen",
        description="the part of a model that reads images, and its projection. none: the language model alone is "
        "loaded, as for texts",
    )
    vision_lr: float | None = Field(
        default=None, gt=0, description="learning rate of that part if it is trained; null: optimizer.lr"
    )
    device: str = Field(default="auto", description="auto: cuda if there is one, else cpu")
    attention: Literal["sdpa", "eager", "flash_attention_2"] | None = Field(
        default=None, description="the attention of transformers; null: sdpa, or eager for a type that has no sdpa"
    )
    packing: bool | None = Field(
        default=None,
        description="policy and reference read a micro-batch without padding, and a beginning that several rows share "
        "once; the numbers are the same. null: if the model's type can be packed, else a note says that it is padded; "
        "true: other types are refused",
    )
    fused_head: bool = Field(
        default=False,
        description="the logits of a micro-batch are never held as a whole; the numbers are the same. It saves memory "
        "from a vocabulary of about 8192 on; untested model types are refused at the start",
    )
    max_tokens_per_micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="tokens of one forward and backward pass; null: 16384, or the longest row. Padding counts only "
        "where there is any: without packing, and for critics and reward models, it is rows x longest row",
    )
    replay_routes: bool = Field(
        default=False,
        description="a mixture of experts is trained with the experts that the sampler used for each token; for "
        "tested model types and single responses",
    )
    router_aux_loss_coef: float = Field(
        default=0.0, ge=0, description="coefficient of the load-balancing loss of experts, losses.load_balance; 0: off"
    )
    max_rows_per_generation: int = Field(default=512, ge=1, description="responses sampled at once")
    peak_tflops: float | None = Field(
        default=None, gt=0, description="a device's peak, for time/mfu; null: the GPU's known rate, or a measured one"
    )

    @property
    def engine_lora(self) -> LoraConfig | None:
        """The adapters that an engine holds beside the model; None: it gets whole weights."""
        return self.lora if self.lora is not None and self.lora.sync == "adapter" else None

    @property
    def teachers(self) -> dict[str, str]:
        """The teachers' models by name; a single teacher has the name \"\". One on a server is not loaded."""
        teachers = self.teacher if isinstance(self.teacher, dict) else {"": self.teacher or self.path}
        return {} if self.teacher_url else teachers

    @property
    def teacher_url(self) -> str | None:
        """The server of the teacher."""
        return self.teacher if isinstance(self.teacher, str) and re.match("https?://", self.teacher) else None

    def with_paths(self, change: Callable[[str], str]) -> "ModelConfig":
        """The same with the path of every model changed, but not the url of a teacher's server."""

        def changed(path: Any) -> Any:
            if isinstance(path, dict):
                return {name: changed(each) for name, each in path.items()}
            return path if path is None or re.match("https?://", path) else change(path)

        names = ("path", "reference", "teacher", "critic", "reward")
        return self.model_copy(update={name: changed(getattr(self, name)) for name in names})

    def here(self, *, weights: bool = True) -> "ModelConfig":
        """The same with paths of copies on this machine; ``weights`` False: of the other files."""
        return self.with_paths(lambda path: local_copy(path, weights=weights))

    @model_validator(mode="after")
    def _some_follow(self) -> "ModelConfig":
        for role, follows in (("reference", self.reference_follows), ("teacher", self.teacher_follows)):
            if follows is not None and self.lora is not None:
                raise ValueError(f"model.{role}_follows needs whole weights, and model.lora adapters: leave one out")
        if self.vision == "trained" and self.lora is not None:
            raise ValueError("model.vision: trained needs whole weights, and model.lora adapters: leave one out")
        if self.vision_lr is not None and self.vision != "trained":
            raise ValueError(f"model.vision_lr: expected vision: trained, got {self.vision}. Leave it out")
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
        if self.packing and self.attention not in (None, "sdpa"):
            raise ValueError(f"packing: expected attention: sdpa, got {self.attention}. Set packing: false")
        return self


TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
"""By dtype the largest mean difference of log-probs, in nats, that rounding explains. Two honest passes of SmolLM2 in
bfloat16 differ by 0.05 on a sentence, two swapped layers by 0.29."""


class ProfileConfig(_Config):
    """The steps that are profiled, in every process."""

    tool: Literal["torch", "nsys", "memory"] = Field(
        default="torch",
        description="torch: operators; on GPUs also nsys: NVTX ranges, and memory: a snapshot of allocations",
    )
    steps: tuple[int, ...] = Field(default=(2, 3), description="steps; none without a setting of profile")
    shapes: bool = Field(default=False, description="record the operators' input shapes")
    memory: bool = Field(default=False, description="record allocations")
    stacks: bool = Field(default=False, description="record the Python stack of each operator: slow")


class OptimizerConfig(_Config):
    """AdamW, or Muon for the matrices, with a warm-up and a decay of the learning rate."""

    name: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon: torch's Muon for the matrices of the layers, with steps as large as AdamW's, and AdamW for "
        "the other weights; only with execution: local",
    )
    lr: float = Field(default=1e-6, gt=0, description="learning rate of AdamW and of Muon")
    lr_of: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={},
        description="other learning rates, by a part of a weight's name; the first that matches is used, such as "
        "{lm_head: 1.0e-7}; 0: the weights do not change. Only with execution: local",
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="of AdamW")
    eps: float = Field(default=1e-8, gt=0, description="of AdamW")
    weight_decay: float = Field(default=0.01, ge=0, description="a step multiplies weights by 1 - lr x weight_decay")
    warmup_steps: int = Field(default=0, ge=0, description="optimizer steps from 0 to lr")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="of the learning rate, after the warm-up"
    )
    final_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="learning rate at the last step / lr, for linear and cosine"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="a larger gradient is scaled down to this norm")
