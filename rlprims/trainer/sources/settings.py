"""The settings of sampling: what is sampled, how many groups, from which weights; and what cannot be combined."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlprims import algorithms
from rlprims.algorithms import PRESETS, Algorithm, Use
from rlprims.environments import Limits
from rlprims.execution import RayConfig, Sampling
from rlprims.runs.config import suggest
from rlprims.trainer.data import DataConfig
from rlprims.trainer.scoring.settings import ScoringSettings


class SamplingSettings(ScoringSettings):
    """The settings of a run that samples."""

    prompts_per_step: int = Field(default=8, ge=1, description="groups of one training batch")
    prompts_per_generation: int | None = Field(
        default=None, ge=1, description="groups that are sampled at once; null: prompts_per_step"
    )
    stream: bool = Field(
        default=False,
        description="score and filter each group when its last response (or episode) ends, and replace a dropped group "
        "at once; false: when the whole generation batch has ended",
    )
    staleness: int = Field(
        default=0,
        ge=0,
        description="the age of samples, in updates. 0: sampled from the newest weights; 1: the next batch is sampled "
        "while this one is trained; 2 or more, with stream: batches of the groups that are complete",
    )
    algorithm: Algorithm
    data: DataConfig
    unscored: Literal["drop_group", "leave_out"] = Field(
        default="drop_group",
        description="of a response without a score: drop its group, or leave out only the response",
    )
    sampling: Sampling = Sampling()
    limits: Limits = Field(default=Limits(), description="limits of an environment's episodes")
    execution: Literal["local", "ray"] = Field(default="local", description="ray: a cluster; needs the extra [ray]")
    ray: RayConfig = RayConfig()
    replay: Path | None = Field(
        default=None, description="directory of a run whose rollouts are used instead of sampling"
    )
    replay_scores: bool = Field(default=False, description="use the recorded scores too; rows without one are scored")

    @field_validator("algorithm", mode="before")
    @classmethod
    def _from_preset(cls, value: Any) -> Any:
        return value if isinstance(value, Algorithm) else algorithm_from(value)

    @model_validator(mode="after")
    def _can_be_sampled(self) -> "SamplingSettings":
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature=0 is greedy, so all responses of a group are equal: use 1.0")
        if self.data.environment is not None:
            self._check_episodes(self.data.environment)
        if self.stream:
            self._check_stream()
        if self.staleness > 1:
            self._check_staleness()
        if self.model.replay_routes and self.replay is not None:
            raise ValueError(
                "model.replay_routes: expected responses that are sampled in this run, got replay: a recording has no "
                "experts; set model.replay_routes: false, and the trainer's own router chooses them"
            )
        return self

    def _check_episodes(self, environment: Use) -> None:
        if environment.unbound:
            wanted = ", ".join(sorted(environment.unbound))
            raise ValueError(f"data.environment: {environment.path} needs a value for {wanted}")
        if self.data.template not in ("chat", "{question}"):
            raise ValueError(
                f"data.template={self.data.template!r} with data.environment: expected chat, or no template; without a "
                "template the contents of the messages are concatenated"
            )
        for name, setting in (
            ("model.reward", self.model.reward),
            ("model.replay_routes", self.model.replay_routes or None),
            ("score_weights", self.score_weights),
            ("replay_scores", self.replay_scores or None),
            ("data.teacher", self.data.teacher),
            ("data.teacher_template", self.data.teacher_template),
        ):
            if setting is not None:
                raise ValueError(f"{name} is for single responses, but data.environment plays episodes: leave it out")

    def _check_stream(self) -> None:
        if "baseline_scores" in self.algorithm.needs:
            raise ValueError(
                f"stream: true samples no greedy responses, but {self.algorithm.advantage.path} needs their "
                "scores: leave stream out, or set algorithm.baseline"
            )
        on_ranks = self.model.reward is not None and self.ray.roles.reward == "main"
        if self.execution == "ray" and self.ray.colocate and on_ranks:
            raise ValueError(
                "stream: true scores while engines sample, but with ray.colocate the reward model waits for their "
                "devices: leave one of the two out, or give the reward model its own pool"
            )
        if self.execution == "ray" and self.data.pools and self.data.environment is None:
            raise ValueError(
                "stream: true draws a prompt when a group is dropped, so with data.pools the prompts would depend on "
                "the speed of the engines: leave one of the two out"
            )

    def _check_staleness(self) -> None:
        on_ray, limits = self.execution == "ray", self.algorithm.filter
        for wrong, reason in (
            (not self.stream, "needs stream: true"),
            (self.replay is not None, "cannot replay a run"),
            (on_ray and self.ray.colocate, "needs engines with devices of their own, without ray.colocate"),
            (on_ray and self.model.engine_lora is not None, "needs model.lora.sync: merged"),
            (limits is not None and limits.at_limit == "smaller_batch", "needs filter.at_limit: error"),
        ):
            if wrong:
                raise ValueError(f"staleness: {self.staleness} {reason}; otherwise use 0 or 1")


def algorithm_from(value: Any) -> Algorithm:
    """An algorithm from a preset's name, from ``{preset: name, ...}`` with changed settings, or from all its fields."""
    if isinstance(value, str):
        value = {"preset": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a preset ({', '.join(sorted(PRESETS))}) or a mapping, got {value!r}")
    if "preset" not in value:
        return algorithms.parse(value)
    name = value["preset"]
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; {suggest(str(name), PRESETS)}")
    takes = inspect.signature(PRESETS[name]).parameters
    arguments = {k: v for k, v in value.items() if k in takes}
    changes = {k: v for k, v in value.items() if k not in takes and k != "preset"}
    return PRESETS[name](**arguments).replace(**changes)
