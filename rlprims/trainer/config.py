"""What a run is told: one YAML file, dotted overrides, and errors that say what to write."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rlprims import algorithms, rewards
from rlprims.algorithms import PRESETS, Algorithm, Use, use
from rlprims.environments import CallStyle, Limits
from rlprims.execution import ModelConfig, OptimizerConfig, ProfileConfig, RayConfig, Sampling
from rlprims.rewards.several import Reward

_PRODUCED = {
    *("scores", "shaped_scores", "baseline_scores", "rewards", "advantages", "returns"),
    *("rollout_log_probs", "old_log_probs", "ref_log_probs", "log_probs", "entropies", "values", "new_values"),
    *("prompts", "responses", "attention_mask", "response_mask", "ended", "component_scores"),
    *("group_ids", "group_tokens", "losses", "totals"),
}
_PRODUCED_BY_EPISODES = {"turn_ids", "turn_rewards", "state_ids", "trajectory_ids", "observation_mask", "versions"}


_SOURCES = {"verifier_scores", "reward_model_scores", "baseline_scores", "shaped_scores", "rm_scores", "failure"}


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Section):
    """Where prompts come from: JSON lines with a question and an answer."""

    train: Path
    eval: Path | None = Field(default=None, description="null: no evaluation")
    question: str = Field(default="question", description="field that holds the question")
    answer: str = Field(default="answer", description="field that holds the answer")
    source: str = Field(default="data_source", description="field to report by; rows without it are of the file's name")
    template: str = Field(
        default="{question}", description="text with {question} in it, or chat: the tokenizer's template"
    )
    system: str | None = Field(default=None, description="system message of the chat template")
    max_prompt_length: int | None = Field(default=None, ge=1, description="tokens; null: what the window leaves")
    overlong_prompts: Literal["filter", "truncate", "error"] = Field(
        default="filter", description="truncate keeps the end"
    )
    shuffle: bool = True
    environment: Use | None = Field(
        default=None, description="class of an environment: its arguments are the row's fields; null: one response"
    )
    calls: CallStyle | None = Field(
        default=None, description="how tool calls are written; null: json with the chat template, else tags"
    )

    @field_validator("template")
    @classmethod
    def _names_the_question(cls, template: str) -> str:
        if template != "chat" and "{question}" not in template:
            raise ValueError("write text with {question} in it, or chat")
        return template


class ScoringConfig(_Section):
    """Where and within what limits the verifier runs; the limits hold in worker processes."""

    workers: int = Field(default=0, ge=0, description="processes; 0: the trainer's own, without limits")
    seconds: float = Field(default=10.0, gt=0, description="wall time of one response")
    cpu_seconds: float | None = Field(
        default=None, gt=0, description="CPU time of one response; null: no limit of its own"
    )
    memory_mb: int | None = Field(
        default=2048, ge=1, description="address space of a worker beyond its start; null: no limit"
    )
    recycle_after: int = Field(default=100_000, ge=1, description="responses after which a worker is replaced")
    preload: tuple[str, ...] = Field(default=(), description="modules that the verifier imports when it first runs")
    timeout: Literal["nan", "zero"] = Field(
        default="nan", description="score of a response that a limit ended; nan takes its group out of training"
    )
    thinking: tuple[str, str] | None = Field(
        default=None, description="opening and closing tag: what is between them is removed before the verifier reads"
    )
    thinking_opened: bool = Field(default=False, description="the prompt ends with the opening tag")

    @field_validator("preload")
    @classmethod
    def _name_modules(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"{name!r} is no module: write it as package.module")
        return names


class RewardConfig(_Section):
    """One of several reward functions: of this process or of workers (``fn``), or at a server (``url``)."""

    fn: Use | None = Field(default=None, description="(response, answer, columns by name) to a score; may be async")
    url: str | None = Field(default=None, description="of a server that scores, as rewards.remote asks it")
    name: str = Field(default="", description="its column; empty: the function's name")
    weight: float = Field(default=1.0, description="in the sum; score_weights goes before; 0: only watched")
    per: Literal["answer", "group", "batch"] = Field(default="answer", description="what one call scores")
    skips: bool = Field(default=False, description="None says that it does not apply to that response")
    workers: int = Field(default=0, ge=0, description="processes, with the limits of scoring; 0: none")
    concurrency: int | None = Field(
        default=None, ge=1, description="calls at once; null: 64 if async, 8 of a server, else one by one"
    )
    seconds: float | None = Field(default=None, gt=0, description="of one call of an async function, or of an attempt")
    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0, description="of responses, about 4 bytes each")
    rows_per_request: int = Field(default=16, ge=1, description="of a server")
    deadline: float | None = Field(default=600.0, gt=0, description="seconds of all requests of a batch to a server")
    retries: int = Field(default=4, ge=0, description="of a request to a server")
    key: str | None = Field(default=None, description="environment variable with the server's key, sent as a bearer's")

    @model_validator(mode="after")
    def _one_place(self) -> "RewardConfig":
        if (self.fn is None) == (self.url is None):
            raise ValueError("write fn, a function's import path, or url, a server's address")
        if self.url is not None and not self.name:
            raise ValueError("a server's column needs a name: write name: ...")
        if self.url is not None and (self.workers or self.per != "answer"):
            raise ValueError("workers and per are of functions; a server is sent rows_per_request at once")
        if self.workers and (self.per != "answer" or self.concurrency or self.seconds):
            raise ValueError("workers score response by response, within the limits of scoring: leave out the others")
        if self.fn is not None:
            called = {"concurrency": self.concurrency, "seconds": self.seconds, "per": self.per}
            limits = {"requests_per_minute": self.requests_per_minute, "tokens_per_minute": self.tokens_per_minute}
            reward = Reward(self.fn.fn, **called, **limits)  # type: ignore[arg-type]
            if self.workers and (reward.is_async or any(limits.values())):
                raise ValueError("workers call no async functions and keep no rates: leave workers out")
        return self

    @property
    def column(self) -> str:
        return self.name or (self.fn.fn.__name__ if self.fn else "")

    @property
    def path(self) -> str:
        """Where it is: an import path, or a server's address."""
        return self.fn.path if self.fn is not None else str(self.url)


class CriticConfig(_Section):
    """The critic's own training, where the algorithm has one."""

    optimizer: OptimizerConfig | None = Field(default=None, description="null: as the policy's")
    warmup_steps: int = Field(default=0, ge=0, description="first steps in which the critic alone is trained")


class EvaluationConfig(_Section):
    every: int = Field(default=50, ge=1, description="steps")
    before_training: bool = True
    samples: int = Field(default=4, ge=1, description="sampled responses per question, beside the greedy one")
    limit: int | None = Field(default=None, ge=1, description="questions; null: all")
    num_examine: int = Field(default=0, ge=0, description="greedy responses printed of each data source")


class CheckpointConfig(_Section):
    every: int = Field(default=50, ge=1, description="steps; the last step is always saved")
    keep: int = Field(default=2, ge=1, description="how many")


class Config(_Section):
    """A run."""

    run_dir: Path = Field(description="where everything is written; it must not exist yet")
    modules: Path | None = Field(
        default=None, description="folder of modules that settings name; of a YAML file: the folder that it is in"
    )
    seed: int = Field(default=0, ge=0, lt=2**32)
    steps: int = Field(default=100, ge=1)
    prompts_per_step: int = Field(default=8, ge=1, description="groups of one training batch")
    prompts_per_generation: int | None = Field(
        default=None, ge=1, description="groups sampled at once; null: prompts_per_step"
    )
    staleness: Literal[0, 1] = Field(default=0, description="1: sample the next batch while this one is trained")
    recompute_log_probs: int = Field(
        default=1,
        ge=1,
        description="steps; between, old_log_probs are the sampler's own, which each such step, the first too, checks",
    )
    algorithm: Algorithm
    model: ModelConfig
    data: DataConfig
    verifier: Use | None = Field(
        default=use(rewards.verifiers.gsm8k),
        description="(response, answer) to a score, which evaluation asks too; null, as it is where rewards are "
        "listed and it is not written: the first of them",
    )
    rewards: tuple[RewardConfig, ...] = Field(default=(), description="reward functions, each with a weight")
    scoring: ScoringConfig = ScoringConfig()
    score_weights: dict[str, float] | None = Field(
        default=None,
        min_length=1,
        description="columns whose weighted sum is the score: verifier_scores, reward_model_scores, those of rewards, "
        "or any of the verifier's; null: all of the first three, each 1 or its own weight",
    )
    unscored: Literal["drop_group", "leave_out"] = Field(
        default="drop_group", description="a response without a score: leave_out keeps the others of its group"
    )
    sampling: Sampling = Sampling()
    limits: Limits = Field(default=Limits(), description="of an environment's episodes")
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    execution: Literal["local", "ray"] = Field(default="local", description="ray: a cluster, by the extra [ray]")
    ray: RayConfig = RayConfig()
    record_rollouts: bool = Field(default=True, description="write every sample to rollouts/")
    num_examine: int = Field(default=0, ge=0, description="samples printed of each data source in each step")
    replay: Path | None = Field(default=None, description="a run whose rollouts are used instead of sampling")
    replay_scores: bool = Field(default=False, description="take the recorded scores too; rows without one are scored")
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = Field(default=(), description="beside metrics.jsonl")
    profile: ProfileConfig = ProfileConfig()
    threads: int = Field(default=1, ge=1, description="of torch on the CPU")

    @field_validator("log_to", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("algorithm", mode="before")
    @classmethod
    def _from_preset(cls, value: Any) -> Any:
        return value if isinstance(value, Algorithm) else algorithm_from(value)

    @model_validator(mode="before")
    @classmethod
    def _rewards_alone(cls, values: Any) -> Any:
        listed = isinstance(values, Mapping) and values.get("rewards")
        return {**values, "verifier": None} if listed and "verifier" not in values else values

    @model_validator(mode="after")
    def _possible(self) -> "Config":
        if self.prompts_per_step % self.algorithm.mini_batches:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} is not divisible by "
                f"algorithm.mini_batches={self.algorithm.mini_batches}: every optimizer step has whole groups"
            )
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature=0 is greedy, and nothing is learned from a single response: use 1.0")
        names = [reward.column for reward in self.rewards]
        if self.verifier is None and not names:
            raise ValueError("verifier: null needs rewards: list a function or a server")
        if repeated := sorted({n for n in names if names.count(n) > 1 or n in _SOURCES or n in _PRODUCED}):
            raise ValueError(f"rewards: {repeated} are taken or there twice: give each a name of its own")
        if not self.weights:
            raise ValueError("rewards: every weight is 0, so that there is no score: give one a weight")
        if self.verifier is None and "verifier_scores" in self.weights:
            raise ValueError("score_weights names verifier_scores, and there is no verifier: write verifier: ...")
        if self.model.reward is None and "reward_model_scores" in self.weights:
            raise ValueError("score_weights names reward_model_scores, and there is no reward model: set model.reward")
        differ = self.execution != "local" or self.staleness or self.replay is not None
        if self.recompute_log_probs > 1 and differ:
            raise ValueError(
                f"recompute_log_probs={self.recompute_log_probs} takes the sampler's log-probs for the trainer's: it "
                "needs execution: local, staleness: 0 and no replay; use 1"
            )
        self._check_environment()
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

    def _check_environment(self) -> None:
        if self.data.environment is None:
            return
        if self.data.environment.unbound:
            wanted = ", ".join(sorted(self.data.environment.unbound))
            raise ValueError(f"data.environment: {self.data.environment.path} needs a value for {wanted}")
        if self.data.template not in ("chat", "{question}"):
            raise ValueError(
                f"data.template={self.data.template!r} with data.environment: the environment writes the prompt; "
                "use chat, or leave the template out: then contents are put end to end"
            )
        for name, setting in (
            ("model.reward", self.model.reward),
            ("score_weights", self.score_weights),
            ("replay", self.replay),
        ):
            if setting is not None:
                raise ValueError(f"{name} is of single responses, and data.environment plays episodes: leave it out")

    @property
    def weights(self) -> dict[str, float]:
        """Columns that make the score."""
        if self.score_weights is not None:
            return self.score_weights
        listed = {reward.column: reward.weight for reward in self.rewards}
        return {name: weight for name in self.score_sources if (weight := listed.get(name, 1.0))}

    @property
    def score_sources(self) -> list[str]:
        """The columns of who scores: the verifier, the reward model, the rewards."""
        first = ["verifier_scores"] * (self.verifier is not None) + ["reward_model_scores"] * bool(self.model.reward)
        return [*first, *(reward.column for reward in self.rewards)]

    @property
    def asked_in_evaluation(self) -> RewardConfig:
        """The verifier, or the first of the rewards."""
        return self.verifiers()[0]

    def verifiers(self) -> list[RewardConfig]:
        """The verifier as one of the rewards, and those that are listed."""
        if self.verifier is None:
            return list(self.rewards)
        first = RewardConfig(fn=self.verifier, name="verifier_scores", workers=self.scoring.workers)
        return [first, *self.rewards]

    @property
    def score_parts(self) -> list[str]:
        """Columns that are logged beside the score; none if it is what the verifier says."""
        if self.model.reward is None and self.score_weights is None and not self.rewards:
            return []
        return list(dict.fromkeys([*self.score_sources, *self.weights]))

    def warnings(self) -> list[str]:
        """What runs and may not mean what it seems to."""
        found = [message for severity, message in algorithms.check(self.algorithm) if severity == "warning"]
        for part in self.algorithm.score_shaping:
            length = dict(part.bound).get("max_length", self.sampling.max_new_tokens)
            if part.fn is rewards.overlong_penalty and length != self.sampling.max_new_tokens:
                found.append(
                    f"overlong_penalty counts to max_length={length}, and responses end at "
                    f"sampling.max_new_tokens={self.sampling.max_new_tokens}"
                )
        episodes = self.data.environment is not None
        unknown = sorted(self.algorithm.needs - _PRODUCED - (_PRODUCED_BY_EPISODES if episodes else set()))
        if unknown:
            who = "the environment must put them into Step.columns" if episodes else "the verifier must return them"
            found.append(
                f"the algorithm needs {unknown}, which the trainer does not make: {who}, one number for each response"
            )
        if self.staleness and "rollout_log_probs" not in self.algorithm.needs:
            found.append(
                "staleness: 1 trains on samples of the weights before the last update, and nothing in "
                f"{self.algorithm.name} knows it: add corrections: [rlprims.corrections.tis], or take a loss that "
                "reads rollout_log_probs"
            )
        in_this_process = [r.fn.fn for r in self.verifiers() if r.fn is not None and not r.workers]
        if not episodes and rewards.verifiers.math in in_this_process:
            found.append("verifiers.math may compute without end on what a model writes: set scoring.workers")
        return found

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def algorithm_from(value: Any) -> Algorithm:
    """An algorithm of a preset's name, of ``{preset: name, ...}`` with its parameters and changed knobs, or in full."""
    if isinstance(value, str):
        value = {"preset": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"write a preset ({', '.join(sorted(PRESETS))}) or a mapping, not {value!r}")
    if "preset" not in value:
        return algorithms.parse(value)
    name = value["preset"]
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; {_suggest(str(name), PRESETS)}")
    takes = inspect.signature(PRESETS[name]).parameters
    arguments = {k: v for k, v in value.items() if k in takes}
    changes = {k: v for k, v in value.items() if k not in takes and k != "preset"}
    return PRESETS[name](**arguments).replace(**changes)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The run of a YAML file, with ``key.subkey=value`` over it.

    A file may begin with ``extends: other.yaml``, a path beside it, whose settings it changes; its ``algorithm`` is
    taken whole. A module beside the file can be named in it: its folder, which ``modules`` keeps for a resume, is
    searched after all that is installed, so that no file in it takes the place of a package.

    Raises:
        ValueError: the file or an override is wrong; one line for each thing to mend, before anything runs.
    """
    values = _read(path)
    for override in overrides:
        _set(values, override)
    modules = str(values.setdefault("modules", str(path.parent.resolve())))
    if modules not in sys.path:
        sys.path.append(modules)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {line}" for line in _lines(error))) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: needs a mapping of settings, such as 'steps: 100'")
    base = values.pop("extends", None)
    if base is None:
        return values
    if (path.parent / base).resolve() == path.resolve():
        raise ValueError(f"{path}: extends itself")
    changes = {key: value for key, value in values.items() if key != "algorithm"}
    merged: dict[str, Any] = algorithms.merge(_read(path.parent / base), changes)
    return merged | {key: values[key] for key in ("algorithm",) if key in values}


def _set(values: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ValueError(f"override {override!r}: write key.subkey=value")
    *parents, last = dotted.split(".")
    for key in parents:
        inner = values.get(key)
        # `algorithm: dapo` and `advantage: rlprims.advantage.rloo` are short for mappings.
        short = {"preset": inner} if key == "algorithm" else {"fn": inner}
        values[key] = dict(inner) if isinstance(inner, dict) else short if isinstance(inner, str) else {}
        values = values[key]
    values[last] = yaml.safe_load(text)


def _lines(error: ValidationError) -> list[str]:
    lines = []
    for e in error.errors():
        place = ".".join(str(part) for part in e["loc"])
        message = e["msg"].removeprefix("Value error, ")
        if e["type"] == "extra_forbidden":
            message = f"unknown; {_suggest(str(e['loc'][-1]), _fields(e['loc'][:-1]))}"
        elif e["type"] == "missing":
            message = f"is missing: write {e['loc'][-1]}: ..."
        elif "input" in e and not isinstance(e["input"], dict):
            message += f", not {e['input']!r}"
        lines += [f"{place}: {part}" if place else part for part in message.splitlines()]
    return lines


def _fields(location: tuple[int | str, ...]) -> list[str]:
    section: Any = Config
    for name in location:
        if isinstance(name, int):  # of a list, whose section is found already
            continue
        annotation = section.model_fields[str(name)].annotation
        section = next(a for a in (annotation, *getattr(annotation, "__args__", ())) if hasattr(a, "model_fields"))
    return list(section.model_fields)


def _suggest(name: str, known: Any) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(sorted(known))}"
