"""The settings of a run: one YAML file, dotted overrides, and errors that name the setting and the fix."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlprims import algorithms, rewards
from rlprims.algorithms import PRESETS, Algorithm, Use, use
from rlprims.environments import Limits
from rlprims.execution import OptimizerConfig, RayConfig, Sampling
from rlprims.execution._ray_config import check_teacher_engine
from rlprims.rewards.several import Reward
from rlprims.runs.config import EvaluationSteps, RunConfig, Section, load_as, suggest
from rlprims.trainer.data import DataConfig

_PRODUCED = {
    *("scores", "shaped_scores", "baseline_scores", "rewards", "advantages", "returns"),
    *("rollout_log_probs", "old_log_probs", "ref_log_probs", "log_probs", "entropies", "values", "new_values"),
    *("teacher_log_probs", "teacher_topk_log_probs", "topk_log_probs", "teacher_mask"),
    *("prompts", "responses", "attention_mask", "response_mask", "ended", "component_scores"),
    *("group_ids", "group_tokens", "losses", "totals"),
}
"""Columns of the vocabulary that the trainer computes, for any algorithm."""
_PRODUCED_BY_EPISODES = {"turn_ids", "turn_rewards", "state_ids", "trajectory_ids", "observation_mask", "versions"}
_SOURCES = {"verifier_scores", "reward_model_scores", "baseline_scores", "shaped_scores", "rm_scores", "failure"}
"""Columns of the trainer whose names no reward may have."""


class ScoringConfig(Section):
    """Processes and limits of the verifier. The limits apply only in worker processes."""

    workers: int = Field(default=0, ge=0, description="processes; 0: the trainer's own, without limits")
    seconds: float = Field(default=10.0, gt=0, description="wall time of one response")
    cpu_seconds: float | None = Field(default=None, gt=0, description="CPU time of one response; null: no limit")
    memory_mb: int | None = Field(
        default=2048, ge=1, description="address space of a worker beyond its start; null: no limit"
    )
    recycle_after: int = Field(default=100_000, ge=1, description="responses after which a worker is replaced")
    preload: tuple[str, ...] = Field(default=(), description="modules that the verifier imports when it first runs")
    timeout: Literal["nan", "zero"] = Field(
        default="nan", description="score of a response that reaches a limit; nan: its group is dropped, see unscored"
    )
    thinking: tuple[str, str] | None = Field(
        default=None,
        description="opening and closing tag; the text between them is removed before the verifier reads the response",
    )
    thinking_opened: bool = Field(default=False, description="the prompt ends with the opening tag")

    @field_validator("preload")
    @classmethod
    def _name_modules(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"{name!r} is not a module name: write it as package.module")
        return names


class RewardConfig(Section):
    """One of several reward functions: a function in this process or in workers (``fn``), or a server (``url``)."""

    fn: Use | None = Field(default=None, description="(response, answer, columns by name) to a score; may be async")
    url: str | None = Field(default=None, description="address of a server that scores, as in rewards.remote")
    name: str = Field(default="", description="its column; empty: the function's name")
    weight: float = Field(default=1.0, description="in the sum; score_weights overrides it; 0: only logged")
    per: Literal["answer", "group", "batch"] = Field(default="answer", description="what one call scores")
    skips: bool = Field(default=False, description="a result of None means that it does not apply to the response")
    workers: int = Field(default=0, ge=0, description="processes, with the limits of scoring; 0: none")
    concurrency: int | None = Field(
        default=None, ge=1, description="calls at the same time; null: 64 if async, 8 to a server, otherwise 1"
    )
    seconds: float | None = Field(
        default=None, gt=0, description="limit of one async call, or of one request to a server"
    )
    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0, description="tokens of responses, about 4 bytes each")
    rows_per_request: int = Field(default=16, ge=1, description="responses in a request to a server")
    deadline: float | None = Field(default=600.0, gt=0, description="seconds of all requests of a batch to a server")
    retries: int = Field(default=4, ge=0, description="repetitions of a failed request to a server")
    key: str | None = Field(
        default=None, description="environment variable with the server's key, sent as a bearer token"
    )

    @model_validator(mode="after")
    def _function_or_server(self) -> "RewardConfig":
        if (self.fn is None) == (self.url is None):
            raise ValueError("write fn, a function's import path, or url, a server's address")
        if self.url is not None and not self.name:
            raise ValueError("expected a name for the column of a server: write name: ...")
        if self.url is not None and (self.workers or self.per != "answer"):
            raise ValueError("workers and per are for functions, not for servers: leave them out")
        if self.workers and (self.per != "answer" or self.concurrency or self.seconds):
            raise ValueError(
                "workers score one response at a time, with the limits of scoring: leave out per, concurrency, seconds"
            )
        if self.fn is not None:
            called = {"concurrency": self.concurrency, "seconds": self.seconds, "per": self.per}
            limits = {"requests_per_minute": self.requests_per_minute, "tokens_per_minute": self.tokens_per_minute}
            reward = Reward(self.fn.fn, **called, **limits)  # type: ignore[arg-type]
            if self.workers and (reward.is_async or any(limits.values())):
                raise ValueError("workers do not support async functions and rates: leave workers out")
        return self

    @property
    def column(self) -> str:
        return self.name or (self.fn.fn.__name__ if self.fn else "")

    @property
    def path(self) -> str:
        """The import path of the function, or the address of the server."""
        return self.fn.path if self.fn is not None else str(self.url)


class CriticConfig(Section):
    """Settings of the critic's training, if the algorithm has a critic."""

    optimizer: OptimizerConfig | None = Field(default=None, description="null: that of the policy")
    warmup_steps: int = Field(default=0, ge=0, description="first steps, which train only the critic")


class EvaluationConfig(EvaluationSteps):
    """Settings of the evaluation by responses to questions."""

    samples: int = Field(default=4, ge=1, description="sampled responses per question, in addition to the greedy one")
    limit: int | None = Field(default=None, ge=1, description="questions; null: all")
    num_examine: int = Field(default=0, ge=0, description="greedy responses of each data source that are printed")
    vote: Literal["boxed", "number", "tag", "text"] | None = Field(
        default=None,
        description="function that extracts the answer of a response, for maj@k, the majority of k; null: no maj@k",
    )
    best: str | None = Field(
        default=None,
        description="metric of an evaluation, such as sampled/acc; the checkpoint with its largest value is kept",
    )
    stop_at: float | None = Field(default=None, description="value of best at which the run ends")
    patience: int | None = Field(
        default=None, ge=1, description="the run ends after this many evaluations without a larger value of best"
    )

    @model_validator(mode="after")
    def _best_is_named(self) -> "EvaluationConfig":
        if self.best is None and (self.stop_at is not None or self.patience is not None):
            raise ValueError("stop_at and patience need a metric: write best: sampled/acc")
        return self


class Config(RunConfig):
    """All settings of a run."""

    steps: int = Field(default=100, ge=1)
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
    recompute_log_probs: int = Field(
        default=1,
        ge=1,
        description="recompute old_log_probs every this many steps, and compare them with the sampler's; other steps "
        "use the sampler's",
    )
    algorithm: Algorithm
    data: DataConfig
    verifier: Use | None = Field(
        default=use(rewards.verifiers.gsm8k),
        description="function of (response, answer) to a score, also in evaluations; null: evaluations use the first "
        "of rewards. Default if there are rewards: null",
    )
    rewards: tuple[RewardConfig, ...] = Field(default=(), description="reward functions, each with a weight")
    scoring: ScoringConfig = ScoringConfig()
    score_weights: dict[str, float] | None = Field(
        default=None,
        min_length=1,
        description="columns whose weighted sum is the score, with weights: verifier_scores, reward_model_scores, "
        "those of rewards, or any other of the verifier; null: the first three, with weight 1 or that of the reward",
    )
    unscored: Literal["drop_group", "leave_out"] = Field(
        default="drop_group",
        description="of a response without a score: drop its group, or leave out only the response",
    )
    sampling: Sampling = Sampling()
    limits: Limits = Field(default=Limits(), description="limits of an environment's episodes")
    critic: CriticConfig = CriticConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    execution: Literal["local", "ray"] = Field(default="local", description="ray: a cluster; needs the extra [ray]")
    ray: RayConfig = RayConfig()
    record_rollouts: bool = Field(default=True, description="write every sample to rollouts/")
    record_rollouts_every: int = Field(default=1, ge=1, description="steps; a replay needs every one")
    compress_rollouts: bool = Field(
        default=False, description="write rollouts/*.jsonl.gz, which the same commands read"
    )
    num_examine: int = Field(default=0, ge=0, description="samples of each data source that are printed in each step")
    replay: Path | None = Field(
        default=None, description="directory of a run whose rollouts are used instead of sampling"
    )
    replay_scores: bool = Field(default=False, description="use the recorded scores too; rows without one are scored")

    @field_validator("algorithm", mode="before")
    @classmethod
    def _from_preset(cls, value: Any) -> Any:
        return value if isinstance(value, Algorithm) else algorithm_from(value)

    @model_validator(mode="before")
    @classmethod
    def _no_verifier_beside_rewards(cls, values: Any) -> Any:
        listed = isinstance(values, Mapping) and values.get("rewards")
        return {**values, "verifier": None} if listed and "verifier" not in values else values

    @model_validator(mode="after")
    def _is_possible(self) -> "Config":
        if self.prompts_per_step % self.algorithm.mini_batches:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} is not divisible by "
                f"algorithm.mini_batches={self.algorithm.mini_batches}: every optimizer step needs whole groups"
            )
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature=0 is greedy, so all responses of a group are equal: use 1.0")
        names = [reward.column for reward in self.rewards]
        if self.verifier is None and not names:
            raise ValueError("verifier: null needs rewards: write a function or a server in rewards")
        if repeated := sorted({n for n in names if names.count(n) > 1 or n in _SOURCES or n in _PRODUCED}):
            raise ValueError(f"rewards: {repeated} occur twice or are names of the trainer: give each a different name")
        if not self.weights:
            raise ValueError("rewards: every weight is 0, expected at least one other weight")
        if self.verifier is None and "verifier_scores" in self.weights:
            raise ValueError("score_weights names verifier_scores, and there is no verifier: write verifier: ...")
        if self.model.reward is None and "reward_model_scores" in self.weights:
            raise ValueError("score_weights names reward_model_scores, and there is no reward model: set model.reward")
        differ = self.execution != "local" or self.staleness or self.replay is not None
        if self.recompute_log_probs > 1 and differ:
            raise ValueError(
                f"recompute_log_probs={self.recompute_log_probs} uses the sampler's log-probs as the trainer's: it "
                "needs execution: local, staleness: 0 and no replay; use 1"
            )
        self._check_teacher()
        self._check_optimizers()
        self._check_environment()
        self._check_stream()
        if self.staleness > 1:
            self._check_flow()
        if self.model.replay_routes and self.replay is not None:
            raise ValueError(
                "model.replay_routes: expected responses that are sampled in this run, got replay: a recording has no "
                "experts; set model.replay_routes: false, and the trainer's own router chooses them"
            )
        if self.unscored == "leave_out":
            for part in (self.algorithm.advantage, self.algorithm.normalization):
                if part is not None and "valid_rows" not in inspect.signature(part.fn).parameters:
                    raise ValueError(
                        f"unscored: leave_out needs an estimator that takes valid_rows, and {part.path} does not: "
                        "use drop_group"
                    )
        errors = [message for severity, message in algorithms.check(self.algorithm) if severity == "error"]
        if errors:
            raise ValueError("; ".join(errors))
        return self

    def _check_optimizers(self) -> None:
        used = [self.optimizer, *([self.critic.optimizer] if self.critic.optimizer else [])]
        if self.execution != "local" and any(each.name != "adamw" or each.lr_of for each in used):
            raise ValueError("optimizer.name: muon and optimizer.lr_of need execution: local: leave them out")

    def _check_teacher(self) -> None:
        several = isinstance(self.model.teacher, dict)
        if several != (self.data.teacher is not None):
            raise ValueError(
                "several models in model.teacher, and data.teacher, the field with a teacher's name, need each other: "
                f"got model.teacher={self.model.teacher!r} and data.teacher={self.data.teacher!r}"
            )
        if self.execution != "local" and (self.model.teacher_follows or self.model.reference_follows):
            raise ValueError("model.teacher_follows and reference_follows need execution: local")
        if "teacher_topk_log_probs" in self.algorithm.needs and self.sampling.truncates:
            raise ValueError(
                "the algorithm compares the whole softmax of teacher and student, but sampling truncates it: "
                "leave top_k, top_p and min_p out"
            )
        if self.execution == "ray" and self.algorithm.needs_teacher:
            temperature, truncates = self.sampling.temperature, self.sampling.truncates
            check_teacher_engine(self.ray, self.model, temperature=temperature, truncates=truncates)

    def _check_stream(self) -> None:
        if self.stream and "baseline_scores" in self.algorithm.needs:
            raise ValueError(
                f"stream: true samples no greedy responses, but {self.algorithm.advantage.path} needs their "
                "scores: leave stream out, or set algorithm.baseline"
            )
        on_ranks = self.model.reward is not None and self.ray.roles.reward == "main"
        if self.stream and self.execution == "ray" and self.ray.colocate and on_ranks:
            raise ValueError(
                "stream: true scores while engines sample, but with ray.colocate the reward model waits for their "
                "devices: leave one of the two out, or give the reward model its own pool"
            )
        if self.stream and self.execution == "ray" and self.data.pools and self.data.environment is None:
            raise ValueError(
                "stream: true draws a prompt when a group is dropped, so with data.pools the prompts would depend on "
                "the speed of the engines: leave one of the two out"
            )

    def _check_flow(self) -> None:
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

    def _check_environment(self) -> None:
        if self.data.environment is None:
            return
        if self.data.environment.unbound:
            wanted = ", ".join(sorted(self.data.environment.unbound))
            raise ValueError(f"data.environment: {self.data.environment.path} needs a value for {wanted}")
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

    @property
    def weights(self) -> dict[str, float]:
        """The columns whose weighted sum is the score."""
        if self.score_weights is not None:
            return self.score_weights
        listed = {reward.column: reward.weight for reward in self.rewards}
        return {name: weight for name in self.score_sources if (weight := listed.get(name, 1.0))}

    @property
    def score_sources(self) -> list[str]:
        """The score columns of the verifier, the reward model and the rewards."""
        first = ["verifier_scores"] * (self.verifier is not None) + ["reward_model_scores"] * bool(self.model.reward)
        return [*first, *(reward.column for reward in self.rewards)]

    @property
    def evaluation_verifier(self) -> RewardConfig:
        """The verifier, or the first of the rewards."""
        return self.verifiers()[0]

    def verifiers(self) -> list[RewardConfig]:
        """The verifier as a reward, and the rewards of the config."""
        if self.verifier is None:
            return list(self.rewards)
        first = RewardConfig(fn=self.verifier, name="verifier_scores", workers=self.scoring.workers)
        return [first, *self.rewards]

    @property
    def score_parts(self) -> list[str]:
        """Columns that are logged in addition to the score; empty if the score is that of the verifier alone."""
        if self.model.reward is None and self.score_weights is None and not self.rewards:
            return []
        return list(dict.fromkeys([*self.score_sources, *self.weights]))

    def warnings(self) -> list[str]:
        """Settings that are allowed but probably not intended."""
        messages = [message for severity, message in algorithms.check(self.algorithm) if severity == "warning"]
        for part in self.algorithm.score_shaping:
            length = dict(part.bound).get("max_length", self.sampling.max_new_tokens)
            if part.fn is rewards.overlong_penalty and length != self.sampling.max_new_tokens:
                messages.append(
                    f"overlong_penalty has max_length={length}, and responses end at "
                    f"sampling.max_new_tokens={self.sampling.max_new_tokens}"
                )
        episodes = self.data.environment is not None
        unknown = sorted(self.algorithm.needs - _PRODUCED - (_PRODUCED_BY_EPISODES if episodes else set()))
        if unknown:
            source = "the environment must put them into Step.columns" if episodes else "the verifier must return them"
            messages.append(
                f"the algorithm needs {unknown}, which the trainer does not compute: {source}, one number per response"
            )
        if self.staleness and "rollout_log_probs" not in self.algorithm.needs:
            messages.append(
                f"staleness: {self.staleness} trains on samples of older weights, and nothing in "
                f"{self.algorithm.name} corrects it: add corrections: [rlprims.corrections.tis], or use a loss that "
                "reads rollout_log_probs"
            )
        uses_teacher = self.algorithm.needs_teacher
        if uses_teacher and self.model.teacher in (None, self.model.path) and self.data.teacher_template is None:
            messages.append(
                "the teacher is the model itself with the same prompt, so teacher and student are equal at the start: "
                "set model.teacher, or data.teacher_template"
            )
        if not uses_teacher and (self.model.teacher is not None or self.model.teacher_follows is not None):
            messages.append(
                f"model.teacher is set, but nothing in {self.algorithm.name} uses a teacher: it is not loaded"
            )
        in_this_process = [r.fn.fn for r in self.verifiers() if r.fn is not None and not r.workers]
        if not episodes and rewards.verifiers.math in in_this_process:
            messages.append("verifiers.math may never finish on a model's response: set scoring.workers")
        return messages


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


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The settings of a YAML file, see :func:`rlprims.runs.config.load_as`."""
    return load_as(Config, path, overrides)
