"""The settings of sampling: what is sampled, how many groups, from which weights; and what cannot be combined."""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlprims import algorithms
from rlprims._near import suggest
from rlprims.algorithms import PRESETS, Algorithm, BoundFunction
from rlprims.environments import EpisodeLimits
from rlprims.execution import RayConfig, Sampling
from rlprims.runs.config import Place
from rlprims.trainer.data import DataConfig
from rlprims.trainer.scoring.settings import ScoringSettings


class SamplingSettings(ScoringSettings):
    """The settings of a run that samples."""

    prompts_per_step: int = Field(default=8, ge=1, description="groups of one training batch")
    prompts_per_generation: int | None = Field(default=None, ge=1, description="groups at once; null: those of a batch")
    stream: bool = Field(
        default=False,
        description="true: a group is scored and filtered when its last response or episode ends, and a dropped group "
        "is replaced at once; false: a whole generation batch is sampled first",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="largest number of updates between the weights that sampled a new response and those that it "
        "trains. 1: the next batch is sampled while this one is trained; 2 or more, with stream: true: groups go on "
        "through updates",
    )
    algorithm: Algorithm = Field(
        description="a preset's name; {preset: dapo, max_length: 512, policy_loss: {clip_high: 0.3}}; or in full"
    )
    data: DataConfig
    unscored: Literal["drop_group", "leave_out"] = Field(
        default="drop_group",
        description="for a response without a score. drop_group: its group is dropped; leave_out: only the response "
        "is left out of the group's statistics, and its advantage is 0",
    )
    sampling: Sampling = Sampling()
    episode_limits: EpisodeLimits = Field(default=EpisodeLimits(), description="limits of an environment's episodes")
    execution: Literal["local", "ray"] = Field(
        default="local", description="local: one process, on a CPU or one GPU; ray: a cluster"
    )
    ray: RayConfig = RayConfig()
    replay: Place | None = Field(
        default=None, description="a run whose recorded rollouts, or turns of episodes, are used instead of sampling"
    )
    replay_scores: bool = Field(default=False, description="use the recorded scores too; score rows without one")

    @field_validator("algorithm", mode="before")
    @classmethod
    def _from_preset(cls, value: Any) -> Any:
        return value if isinstance(value, Algorithm) else algorithm_from(value)

    @model_validator(mode="after")
    def _can_be_sampled(self) -> "SamplingSettings":
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature=0 is greedy, so all responses of a group are equal: use 1.0")
        if self.sampling.penalizes:
            need = "the trainer scores the policy's own distribution, which a penalty changes"
            raise ValueError(f"sampling: {need}; write penalties into evaluation.sampling")
        if self.replay is not None and self.sampling.thinking_budget is not None:
            raise ValueError("replay: a recording does not say which tokens thinking_budget forced: leave one out")
        if self.data.environment is not None:
            self._check_episodes(self.data.environment)
        elif self.verifier is None and not self.rewards:
            raise ValueError(
                "nothing scores the responses: write verifier: rewards.verifiers.gsm8k, or another of "
                "rewards.verifiers (by_source chooses by the rows' data_source), or rewards: [...]"
            )
        if self.stream:
            self._check_stream()
        if self.max_staleness > 1:
            self._check_staleness()
        if self.model.replay_routes and self.replay is not None:
            raise ValueError(
                "model.replay_routes: expected responses that are sampled in this run, got replay: a recording has no "
                "experts; set model.replay_routes: false, and the trainer's own router chooses them"
            )
        return self

    def _check_episodes(self, environment: BoundFunction) -> None:
        if environment.unbound:
            wanted = ", ".join(sorted(environment.unbound))
            raise ValueError(f"data.environment: {environment.path} needs a value for {wanted}")
        missing = [name for name in ("reset", "step") if not hasattr(environment.fn, name)]
        if inspect.isclass(environment.fn) and missing and not hasattr(environment.fn, "__getattr__"):
            expected = "reset(), which returns the first messages, and step(message), which returns a Step"
            raise ValueError(f"data.environment: {environment.path} has no method {missing[0]}: expected {expected}")
        if self.data.template not in ("chat", "{question}"):
            raise ValueError(
                f"data.template={self.data.template!r} with data.environment: expected chat, or no template; without a "
                "template the contents of the messages are concatenated"
            )
        if self.data.declares_images and self.data.template != "chat":
            raise ValueError(f"{environment.path} has images, expected data.template: chat, got {self.data.template!r}")
        for name, setting in (
            ("model.reward", self.model.reward),
            ("model.replay_routes", self.model.replay_routes or None),
            ("verifier", self.verifier),
            ("rewards", self.rewards or None),
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
                raise ValueError(f"max_staleness: {self.max_staleness} {reason}; otherwise use 0 or 1")


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
