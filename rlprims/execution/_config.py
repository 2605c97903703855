"""What an execution layer is told, whatever it runs on."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


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
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = Field("auto", description="auto: cuda if there is one, else cpu")
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    max_tokens_per_micro_batch: int = Field(16384, ge=1, description="rows x longest row of one forward and backward")
    max_rows_per_generation: int = Field(512, ge=1, description="responses sampled at once")


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
