"""The settings of a run that samples and trains. Those of sampling and scoring stand with these features."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from rlprims import algorithms, rewards
from rlprims.execution import OptimizerConfig
from rlprims.runs.config import EvaluationSteps, Section, load_as
from rlprims.trainer.scoring.settings import COMPUTED
from rlprims.trainer.sources.settings import SamplingSettings
from rlprims.trainer.teacher import check_teacher, teacher_warnings

_COMPUTED_FROM_TURNS = {"turn_ids", "turn_rewards", "state_ids", "trajectory_ids", "observation_mask", "versions"}
_NOT_COMPUTED = {"action_ids", "continuation_values", "expert_mask", "process_rewards", "sum_pi_squared", "tree_ids"}
"""Columns of tokens or integers, which neither the trainer computes nor a verifier or an environment can return."""


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


class Config(SamplingSettings):
    """All settings of a run."""

    steps: int = Field(default=100, ge=1)
    recompute_log_probs: int = Field(
        default=1,
        ge=1,
        description="recompute old_log_probs every this many steps, and compare them with the sampler's; other steps "
        "use the sampler's",
    )
    critic: CriticConfig = CriticConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    record_rollouts: bool = Field(default=True, description="write every sample to rollouts/")
    record_rollouts_every: int = Field(default=1, ge=1, description="steps; a replay needs every one")
    compress_rollouts: bool = Field(
        default=False, description="write rollouts/*.jsonl.gz, which the same commands read"
    )
    num_examine: int = Field(default=0, ge=0, description="samples of each data source that are printed in each step")

    @model_validator(mode="after")
    def _can_be_trained(self) -> "Config":
        if self.prompts_per_step % self.algorithm.mini_batches:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} is not divisible by "
                f"algorithm.mini_batches={self.algorithm.mini_batches}: every optimizer step needs whole groups"
            )
        differ = self.execution != "local" or self.staleness or self.replay is not None
        if self.recompute_log_probs > 1 and differ:
            raise ValueError(
                f"recompute_log_probs={self.recompute_log_probs} uses the sampler's log-probs as the trainer's: it "
                "needs execution: local, staleness: 0 and no replay; use 1"
            )
        check_teacher(self)
        self._check_optimizers()
        if self.unscored == "leave_out":
            for part in (self.algorithm.advantage, self.algorithm.normalization):
                if part is not None and "valid_rows" not in inspect.signature(part.fn).parameters:
                    raise ValueError(
                        f"unscored: leave_out needs an estimator that takes valid_rows, and {part.path} does not: "
                        "use drop_group"
                    )
        plays = self.data.environment is not None
        if not plays and (missing := sorted(self.algorithm.needs & _COMPUTED_FROM_TURNS)):
            raise ValueError(f"the algorithm needs {missing}, which only an environment gives: set data.environment")
        if missing := sorted(self.algorithm.needs & _NOT_COMPUTED):
            raise ValueError(
                f"the algorithm needs {missing}, which nothing in a run computes: call its parts in a loop of your own"
            )
        errors = [message for severity, message in algorithms.check(self.algorithm) if severity == "error"]
        if errors:
            raise ValueError("; ".join(errors))
        return self

    def _check_optimizers(self) -> None:
        used = [self.optimizer, *([self.critic.optimizer] if self.critic.optimizer else [])]
        if self.execution != "local" and any(each.name != "adamw" or each.lr_of for each in used):
            raise ValueError("optimizer.name: muon and optimizer.lr_of need execution: local: leave them out")

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
        plays = self.data.environment is not None
        unknown = sorted(self.algorithm.needs - COMPUTED - (_COMPUTED_FROM_TURNS if plays else set()))
        if unknown:
            source = "the environment must put them into Step.columns" if plays else "the verifier must return them"
            messages.append(
                f"the algorithm needs {unknown}, which the trainer does not compute: {source}, one number per response"
            )
        if self.staleness and "rollout_log_probs" not in self.algorithm.needs:
            messages.append(
                f"staleness: {self.staleness} trains on samples of older weights, and nothing in "
                f"{self.algorithm.name} corrects it: add corrections: [rlprims.corrections.tis], or use a loss that "
                "reads rollout_log_probs"
            )
        messages += teacher_warnings(self)
        in_this_process = [r.fn.fn for r in self.verifiers() if r.fn is not None and not r.workers]
        endless = [one for one in (rewards.verifiers.math, rewards.verifiers.by_source) if one in in_this_process]
        if endless and not plays:
            messages.append(f"verifiers.{endless[0].__name__} may never finish on a response: set scoring.workers")
        return messages


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The settings of a YAML file, see :func:`rlprims.runs.config.load_as`."""
    return load_as(Config, path, overrides)
