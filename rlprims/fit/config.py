"""The settings of a run on stored rows: demonstrations, or pairs of a chosen and a rejected response."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlprims import losses
from rlprims.algorithms import BoundFunction, use
from rlprims.execution import Kind, kind_of, reads_means, reads_reference
from rlprims.runs.config import EvaluationSteps, RunConfig
from rlprims.runs.rows import RowsConfig

_OF_SAMPLES = ("reference_follows", "teacher", "teacher_follows", "critic", "reward", "reward_template")
"""Settings of ``model`` that are only for runs on the policy's own samples."""


class FitDataConfig(RowsConfig):
    """Demonstrations with a prompt and a response, or messages of a chat; or pairs."""

    prompt: str = Field(default="prompt", description="field that holds the prompt: a text or messages")
    response: str = Field(default="response", description="field that holds a demonstration's response")
    messages: str = Field(default="messages", description="field that holds a chat, instead of prompt and response")
    chosen: str = Field(default="chosen", description="field that holds a pair's better response, or the whole chat")
    rejected: str = Field(default="rejected", description="field that holds a pair's worse response")
    margin: str | None = Field(
        default=None, description="field with a pair's margin, a number, for losses.bradley_terry; null: none"
    )
    template: str = Field(default="{prompt}", description="text with {prompt} in it, or chat: the tokenizer's template")
    turns: Literal["all", "last"] = Field(default="all", description="the assistant's messages that are learned")
    max_length: int | None = Field(default=None, ge=2, description="tokens of prompt and response; null: the window")
    overlong_prompts: Literal["filter", "truncate", "error"] = Field(
        default="filter", description="filter leaves the row out, truncate cuts the prompt's beginning off"
    )
    overlong_rows: Literal["truncate", "filter", "error"] = Field(
        default="truncate", description="truncate cuts a response, which then has no end token"
    )


class FitConfig(RunConfig):
    """The settings of a run on stored rows. The loss defines the form of the rows and what is trained."""

    of_another_command = ("algorithm", "train")

    loss: BoundFunction = Field(
        default=use(losses.nll),
        description="a loss of rlprims.losses, or your own; its parameters say what a row is and what is trained",
    )
    aggregation: BoundFunction = Field(
        default=use(losses.token_mean),
        description="mean over the tokens of a step's demonstrations; pairs have the mean over pairs",
    )
    means: bool | None = Field(
        default=None,
        description="true: pairs are compared by means over their tokens; false: by sums; null: as the loss is defined",
    )
    tail_weight: float = Field(
        default=1.0, ge=0, le=1, description="of a pair's tokens after the length of its shorter response: LD-DPO's α"
    )
    epochs: int = Field(default=1, ge=1, description="passes over the rows")
    steps: int | None = Field(default=None, ge=1, description="optimizer steps; null: as many as the epochs need")
    rows_per_step: int = Field(default=32, ge=1, description="demonstrations or pairs per optimizer step")
    data: FitDataConfig
    evaluation: EvaluationSteps = Field(default=EvaluationSteps(), description="on held-out rows")
    execution: Literal["local", "ray"] = Field(default="local", description="local: one process; ray: not yet")

    @field_validator("loss", mode="before")
    @classmethod
    def _short_name(cls, value: Any) -> Any:
        """``dpo`` is short for ``losses.dpo``, and ``sft`` for ``losses.nll``."""
        path = value.get("fn") if isinstance(value, Mapping) else value
        if not isinstance(path, str) or "." in path:
            return value
        full = "losses." + {"sft": "nll"}.get(path, path)
        return {**value, "fn": full} if isinstance(value, Mapping) else full

    @model_validator(mode="after")
    def _is_possible(self) -> "FitConfig":
        kind = self.kind
        if self.loss.unbound:
            raise ValueError(f"loss: {self.loss.path} needs a value for {', '.join(sorted(self.loss.unbound))}")
        if self.execution == "ray":
            instead = "Leave execution out, and use the result as model.path of a run on samples"
            raise ValueError(f"execution: ray does not support stored rows yet. {instead}")
        unused = [name for name in _OF_SAMPLES if getattr(self.model, name) is not None]
        if self.model.reference is not None and not reads_reference(self.loss):
            unused.append("reference")
        if self.model.replay_routes:
            unused.append("replay_routes")
        if self.model.router_aux_loss_coef and kind == "scores":
            unused.append("router_aux_loss_coef")
        if unused:
            where = f"in a run on stored rows with {self.loss.path}"
            raise ValueError(f"model.{unused[0]} is not used {where}: leave it out")
        if self.means is not None and kind != "pairs":
            raise ValueError(f"means is for losses on pairs of log-probs, which {self.loss.path} is not: leave it out")
        if self.tail_weight != 1 and (kind != "pairs" or self.takes_means):
            raise ValueError("tail_weight is for losses on pairs that compare sums of log-probs: leave it out")
        if self.data.margin is not None and kind != "scores":
            raise ValueError(f"data.margin is for losses.bradley_terry, but the loss is {self.loss.path}: leave it out")
        return self

    @property
    def kind(self) -> Kind:
        return kind_of(self.loss)

    @property
    def takes_means(self) -> bool:
        return reads_means(self.loss) if self.means is None else self.means
