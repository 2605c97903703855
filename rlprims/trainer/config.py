"""The settings of a run that samples and trains. Those of sampling and scoring stand with these features."""

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from rlprims import algorithms, rewards
from rlprims.execution import EvaluatedSampling, OptimizerConfig, Sampling
from rlprims.runs.config import EvaluationSteps, Place, Section, load_as
from rlprims.trainer.evaluation import METRIC, Vote
from rlprims.trainer.old_groups import OldGroupsConfig, check_old_groups
from rlprims.trainer.scoring.settings import COMPUTED
from rlprims.trainer.sources.settings import SamplingSettings
from rlprims.trainer.teacher import check_teacher, teacher_warnings

_COMPUTED_FROM_TURNS = {"turn_ids", "turn_rewards", "state_ids", "trajectory_ids", "observation_mask", "versions"}
_NOT_COMPUTED = {"action_ids", "continuation_values", "expert_mask", "process_rewards", "sum_pi_squared", "tree_ids"}
"""Columns of tokens or integers, which neither the trainer computes nor a verifier or an environment can return."""


class CriticConfig(Section):
    """Settings of the critic's training, if the algorithm has a critic."""

    optimizer: OptimizerConfig | None = Field(default=None, description="null: the settings of the policy's optimizer")
    warmup_steps: int = Field(default=0, ge=0, description="number of first steps in which only the critic is trained")
    updates_per_policy_update: int = Field(default=1, ge=1, description="optimizer steps on a mini-batch")
    freeze: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="parts of names; weights with one in their name are not trained, such as [self_attn]"
    )


class EvaluationSampling(Section):
    """What the sampled responses of an evaluation have instead of the run's ``sampling``."""

    temperature: float | None = Field(default=None, gt=0, description="null: that of sampling, as in the next two")
    top_k: int | None = Field(default=None, ge=0, description="number of the likeliest tokens that are kept; 0: all")
    top_p: float | None = Field(default=None, gt=0, le=1, description="nucleus; 1: all tokens")
    thinking_budget: int | None = Field(default=None, ge=0, description="null: that of sampling, as in the next four")
    repetition_penalty: float | None = Field(default=None, gt=0, description="of prompt and response; 1: none")
    presence_penalty: float | None = Field(default=None, description="of the response's tokens; 0: none")
    frequency_penalty: float | None = Field(default=None, description="the same, times their number")
    logits_processors: tuple[algorithms.BoundFunction, ...] | None = Field(default=None, description="may change all")

    def over(self, sampling: Sampling) -> EvaluatedSampling:
        return EvaluatedSampling(**sampling.model_dump() | self.model_dump(exclude_none=True))


class EvaluationSet(Section):
    """A further set of questions. What it leaves out is as in ``evaluation``."""

    file: Place
    verifier: algorithms.BoundFunction | None = None
    sampling: EvaluationSampling = EvaluationSampling()
    samples: int = Field(default=0, ge=0)
    limit: int | None = Field(default=None, ge=1)
    vote: Vote | None = None


class EvaluationConfig(EvaluationSteps):
    """Settings of the evaluation by responses to questions."""

    verifier: algorithms.BoundFunction | None = Field(default=None, description="null: that of the training")
    sampling: EvaluationSampling = EvaluationSampling()
    sets: dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], EvaluationSet] = Field(
        default={},
        description="further questions, by the name before their metrics: {math: {file: math.jsonl, samples: 16}}, "
        "with a verifier, sampling, samples, limit and vote of their own if they differ",
    )
    samples: int = Field(default=4, ge=1, description="sampled responses per question, besides the greedy one")
    limit: int | None = Field(default=None, ge=1, description="number of questions; null: all")
    print_samples: int = Field(default=0, ge=0, description="greedy responses that are printed for each data source")
    vote: Vote | None = Field(
        default=None,
        description="the part of a response that is its answer, for maj@k, a majority of k responses: boxed its last "
        "\\boxed{}, number its last number, tag its last <answer>, text the whole; null: no maj@k",
    )
    best: str | None = Field(
        default=None,
        description="metric of an evaluation, such as sampled/acc; the checkpoint with its largest value is kept "
        "besides the newest, and best.json names it",
    )
    stop_at: float | None = Field(default=None, description="value of best at which the run ends")
    patience: int | None = Field(
        default=None, ge=1, description="number of evaluations without a larger best after which the run ends"
    )

    @model_validator(mode="after")
    def _best_is_named(self) -> "EvaluationConfig":
        if self.best is None and (self.stop_at is not None or self.patience is not None):
            raise ValueError("stop_at and patience need a metric: write best: sampled/acc")
        names = "".join(f"{re.escape(name)}/|" for name in self.sets)
        if self.best is not None and not re.fullmatch(f"({names})({METRIC})", self.best):
            raise ValueError(f"best: no metric {self.best!r}; sampled/acc, greedy/acc and sampled/pass@2 are some")
        return self


class Config(SamplingSettings):
    """All settings of a run."""

    of_another_command = ("loss", "fit")

    steps: int = Field(default=100, ge=1, description="training batches")
    recompute_log_probs_every: int = Field(
        default=1,
        ge=1,
        description="steps between two in which the trainer computes old_log_probs; in the others they are the "
        "sampler's, which saves a forward pass of the batch. Above 1: only with execution: local, and always with "
        "end_at_mismatch",
    )
    end_at_mismatch: bool = Field(
        default=False,
        description="a step ends the run if mismatch_max is above 0.02 nats (float16: 0.6, bfloat16: 3) or "
        "mismatch_ess below 0.9, of tokens of the newest weights; false: a warning in the terminal",
    )
    audit: bool = Field(default=False, description="write the first step's formulas and errors: audit.html, audit.json")
    old_groups: OldGroupsConfig = OldGroupsConfig()
    critic: CriticConfig = CriticConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    record_rollouts: bool = Field(default=True, description="write every sample to rollouts/, during the next step")
    record_rollouts_every: int = Field(default=1, ge=1, description="steps between recorded ones; a replay needs all")
    compress_rollouts: bool = Field(default=False, description="write rollouts/*.jsonl.gz, read by the same commands")
    print_samples: int = Field(
        default=0, ge=0, description="samples that are printed for each data source in each step, with every score"
    )
    log_samples: int = Field(default=0, ge=0, description="samples of each step in a table of log_to")

    @model_validator(mode="after")
    def _can_be_trained(self) -> "Config":
        if self.prompts_per_step % self.algorithm.mini_batches:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} is not divisible by "
                f"algorithm.mini_batches={self.algorithm.mini_batches}: every optimizer step needs whole groups"
            )
        differ = self.execution != "local" or self.max_staleness or self.replay is not None or self.old_groups.share
        if self.recompute_log_probs_every > 1 and differ:
            raise ValueError(
                f"recompute_log_probs_every={self.recompute_log_probs_every} uses the sampler's log-probs as the "
                "trainer's: it needs execution: local, max_staleness: 0, no replay and no old_groups; use 1"
            )
        check_teacher(self)
        check_old_groups(self.old_groups, self)
        if self.algorithm.value_loss is None and (self.critic.freeze or self.critic.updates_per_policy_update > 1):
            raise ValueError(f"critic.freeze, updates_per_policy_update: {self.algorithm.name} trains no critic")
        if self.evaluation.sets and self.data.eval is None:
            raise ValueError("evaluation.sets are besides data.eval: write one of them there")
        if self.data.environment is not None and any(one.verifier for one in self.evaluations().values()):
            raise ValueError("evaluation: an environment scores its own episodes: leave verifier out")
        for each in self.evaluations().values():
            each.sampling.over(self.sampling)  # an error if they do not go together
        used = [self.optimizer, *([self.critic.optimizer] if self.critic.optimizer else [])]
        if self.execution != "local" and any(each.name != "adamw" or each.lr_of for each in used):
            raise ValueError("optimizer.name: muon and optimizer.lr_of need execution: local: leave them out")
        if self.unscored == "leave_out":
            for part in (self.algorithm.advantage, self.algorithm.normalization):
                if part is not None and "valid_rows" not in inspect.signature(part.fn).parameters:
                    need = f"an estimator that takes valid_rows, and {part.path} does not"
                    raise ValueError(f"unscored: leave_out needs {need}: use drop_group")
        plays = self.data.environment is not None
        if not plays and (missing := sorted(self.algorithm.needs & _COMPUTED_FROM_TURNS)):
            raise ValueError(f"the algorithm needs {missing}, which only an environment gives: set data.environment")
        if missing := sorted(self.algorithm.needs & _NOT_COMPUTED):
            raise ValueError(f"the algorithm needs {missing}, which nothing in a run computes: write your own loop")
        errors = [message for severity, message in algorithms.check(self.algorithm) if severity == "error"]
        if errors:
            raise ValueError("; ".join(errors))
        return self

    def evaluations(self) -> dict[str, EvaluationSet]:
        """Every set of questions by its name, with all its settings; that of data.eval has the name \"\"."""
        fields = {name: field for name, field in EvaluationSet.model_fields.items() if name != "file"}
        sets = {"": EvaluationSet(file=self.data.eval), **self.evaluation.sets} if self.data.eval is not None else {}
        shared = {name: getattr(self.evaluation, name) for name in fields}
        unset = {name: [k for k in fields if getattr(one, k) == fields[k].default] for name, one in sets.items()}
        return {name: one.model_copy(update={k: shared[k] for k in unset[name]}) for name, one in sets.items()}

    def warnings(self) -> list[str]:
        """Settings that are allowed but probably not intended."""
        messages = [message for severity, message in algorithms.check(self.algorithm) if severity == "warning"]
        for part in self.algorithm.score_shaping:
            limit = self.sampling.max_new_tokens
            length = dict(part.bound).get("max_length", limit)
            if part.fn is rewards.overlong_penalty and length != limit:
                ends = f"responses end at sampling.max_new_tokens={limit}"
                messages.append(f"overlong_penalty has max_length={length}, and {ends}")
        plays = self.data.environment is not None
        unknown = sorted(self.algorithm.needs - COMPUTED - (_COMPUTED_FROM_TURNS if plays else set()))
        if unknown:
            source = "the environment must put them into Step.columns" if plays else "the verifier must return them"
            messages.append(
                f"the algorithm needs {unknown}, which the trainer does not compute: {source}, one number per response"
            )
        if self.max_staleness and "rollout_log_probs" not in self.algorithm.needs:
            messages.append(
                f"max_staleness: {self.max_staleness} trains on samples of older weights, and nothing in "
                f"{self.algorithm.name} corrects it: add corrections: [rlprims.corrections.tis], or use a loss that "
                "reads rollout_log_probs"
            )
        messages += teacher_warnings(self)
        in_this_process = [r.fn.fn for r in self.verifiers() if not r.workers]
        endless = [one for one in (rewards.verifiers.math, rewards.verifiers.by_source) if one in in_this_process]
        if endless and not plays:
            messages.append(f"verifiers.{endless[0].__name__} may never finish on a response: set scoring.workers")
        return messages


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The settings of a YAML file, see :func:`rlprims.runs.config.load_as`."""
    return load_as(Config, path, overrides)
