"""The settings of scoring: the verifier, the rewards, their limits and weights."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rlprims.algorithms import BoundFunction
from rlprims.rewards.several import Reward
from rlprims.runs.config import RunConfig, Section

SCORE_COLUMNS = {"verifier_scores", "reward_model_scores", "baseline_scores", "shaped_scores", "rm_scores", "failure"}
"""Columns of scores whose names no reward may have."""
COMPUTED = {
    *("scores", "shaped_scores", "baseline_scores", "rewards", "advantages", "returns"),
    *("rollout_log_probs", "old_log_probs", "ref_log_probs", "log_probs", "entropies", "values", "new_values"),
    *("teacher_log_probs", "teacher_topk_log_probs", "topk_log_probs", "teacher_mask"),
    *("hidden", "head_weight", "teacher_hidden", "teacher_head_weight"),
    *("prompts", "responses", "attention_mask", "response_mask", "ended", "component_scores"),
    *("group_ids", "group_tokens", "losses", "totals"),
}
"""Columns of the vocabulary that the trainer computes, for any algorithm."""


class ScoringConfig(Section):
    """Processes and limits of the verifier. The limits apply only in worker processes."""

    workers: int = Field(
        default=0, ge=0, description="processes that run the verifier; 0: the trainer's own process, without limits"
    )
    seconds: float = Field(default=10.0, gt=0, description="limit of the wall time for one response")
    cpu_seconds: float | None = Field(default=None, gt=0, description="limit of a response's CPU time; null: none")
    memory_mb: int | None = Field(
        default=2048, ge=1, description="limit of a worker's address space, beyond that at its start; null: no limit"
    )
    recycle_after: int = Field(default=100_000, ge=1, description="responses after which a worker is replaced")
    preload: tuple[str, ...] = Field(
        default=(), description="modules that the verifier imports when it first runs, such as sympy"
    )
    timeout: Literal["nan", "zero"] = Field(
        default="nan", description="score of a response whose verifier reached a limit; nan: see unscored"
    )
    thinking: tuple[str, str] | None = Field(
        default=None,
        description="opening and closing tag; the text between them is removed before the verifier reads the response",
    )
    thinking_opened: bool = Field(default=False, description="true: the prompt ends with the opening tag")

    @field_validator("preload")
    @classmethod
    def _name_modules(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"{name!r} is not a module name: write it as package.module")
        return names


class RewardConfig(Section):
    """One of several reward functions, in this process or in workers."""

    fn: BoundFunction = Field(description="(response, answer, columns) to a score; may be async")
    name: str = Field(default="", description="its column; empty: the function's name")
    weight: float = Field(default=1.0, description="in the sum; score_weights overrides it; 0: only logged")
    per: Literal["answer", "group", "batch"] = Field(default="answer", description="what one call scores")
    skips: bool = Field(default=False, description="a result of None means that it does not apply to the response")
    workers: int = Field(default=0, ge=0, description="processes, with the limits of scoring; 0: none")
    concurrency: int | None = Field(default=None, ge=1, description="calls at once; null: 64 if async, otherwise 1")
    seconds: float | None = Field(default=None, gt=0, description="limit of an async call")
    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0, description="tokens of responses, about 4 bytes each")

    @model_validator(mode="before")
    @classmethod
    def _of_a_server(cls, values: Any) -> Any:
        if isinstance(values, dict) and "url" in values:
            server = f"{{fn: examples/remote_reward.py:remote, server: {{url: {values['url']!r}}}}}"
            raise ValueError(f"a server is asked by a file of the examples: write fn: {server}, per: batch")
        return values

    @model_validator(mode="after")
    def _limits_fit_the_function(self) -> "RewardConfig":
        if self.workers and (self.per != "answer" or self.concurrency or self.seconds):
            raise ValueError("workers score one by one, by the limits of scoring: leave out per, concurrency, seconds")
        called = {"concurrency": self.concurrency, "seconds": self.seconds, "per": self.per}
        limits = {"requests_per_minute": self.requests_per_minute, "tokens_per_minute": self.tokens_per_minute}
        reward = Reward(self.fn.fn, **called, **limits)  # type: ignore[arg-type]
        if self.workers and (reward.is_async or any(limits.values())):
            raise ValueError("workers do not support async functions and rates: leave workers out")
        return self

    @property
    def column(self) -> str:
        return self.name or self.fn.fn.__name__


class ScoringSettings(RunConfig):
    """The settings of a run that scores responses."""

    verifier: BoundFunction | None = Field(
        default=None,
        description="function of (response, answer) that returns a float, or a dict with score; {fn: ..., tag: "
        "answer} sets its other arguments. Needed, unless there are rewards or an environment; null: evaluations use "
        "the first of rewards",
    )
    rewards: tuple[RewardConfig, ...] = Field(default=(), description="functions with weights")
    scoring: ScoringConfig = ScoringConfig()
    score_weights: dict[str, float] | None = Field(
        default=None,
        min_length=1,
        description="columns whose weighted sum is the score: verifier_scores, reward_model_scores, those of rewards, "
        "or any column of the verifier; null: all of the first three, with weight 1 or that of the reward",
    )

    @model_validator(mode="after")
    def _sources_of_the_score_exist(self) -> "ScoringSettings":
        names = [reward.column for reward in self.rewards]
        if repeated := sorted({n for n in names if names.count(n) > 1 or n in SCORE_COLUMNS or n in COMPUTED}):
            raise ValueError(f"rewards: {repeated} occur twice or are names of the trainer: give each a different name")
        if names and not self.weights:
            raise ValueError("rewards: every weight is 0, expected at least one other weight")
        if self.verifier is None and "verifier_scores" in self.weights:
            raise ValueError("score_weights names verifier_scores, and there is no verifier: write verifier: ...")
        if self.model.reward is None and "reward_model_scores" in self.weights:
            raise ValueError("score_weights names reward_model_scores, and there is no reward model: set model.reward")
        return self

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

    def verifiers(self, evaluation: BoundFunction | None = None) -> list[RewardConfig]:
        """The verifier, or that of an evaluation, as a reward, and the rewards of the config."""
        own = evaluation or self.verifier
        first = RewardConfig(fn=own, name="verifier_scores", workers=self.scoring.workers) if own else None
        return [*([first] if first else []), *self.rewards]

    @property
    def score_parts(self) -> list[str]:
        """Columns that are logged in addition to the score; empty if the score is that of the verifier alone."""
        if self.model.reward is None and self.score_weights is None and not self.rewards:
            return []
        return list(dict.fromkeys([*self.score_sources, *self.weights]))
