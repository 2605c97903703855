"""The loop, as in the papers: generate, score, filter, shape, log-probs, values, advantage, update, sync.

The first four are :class:`rlprims.trainer.collect.collector.Collector`'s, the rest is here. Everything else about a run
(evaluation, checkpoints, progress, logs) enters through hooks, called after each step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from rlprims import diagnostics
from rlprims.algorithms import estimate_advantages, mask_turns, token_weights
from rlprims.controllers import KLController
from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.execution import Models, UpdateReport
from rlprims.grouping import dense_ids
from rlprims.layout import sequence_sum
from rlprims.ratios import estimate_kl
from rlprims.trainer.collect.collector import Collector
from rlprims.trainer.collect.episodes import outcome_scores, rollout_ids
from rlprims.trainer.collect.flow import Flow
from rlprims.trainer.collect.pipeline import Pipeline
from rlprims.trainer.collect.rollout import join
from rlprims.trainer.config import Config
from rlprims.trainer.data import Example
from rlprims.trainer.measures import Clock, largest_mismatch, responses, summarize
from rlprims.trainer.old_log_probs import old_log_probs
from rlprims.trainer.states import States
from rlprims.trainer.teaching import TAUGHT, lessons


@dataclass
class Step:
    """What happened in one step."""

    number: int
    batch: DataProto
    """The rows that were trained on, with their advantages."""
    dropped: list[tuple[DataProto, str]]
    """The groups that were not trained on, each with the reason (of a greedy baseline: "greedy baseline")."""
    surplus: list[DataProto]
    """The groups that were sampled with this batch and wait for the next."""
    metrics: dict[str, float] = field(default_factory=dict)


class Stepper(Protocol):
    """What a run repeats: a :class:`Trainer`, or that of stored rows."""

    step_number: int

    @property
    def steps(self) -> int:
        """Of the whole run."""
        ...

    def step(self) -> Step: ...

    def state_dict(self) -> tuple[dict[str, Any], dict[str, list[DataProto]]]:
        """JSON values, and groups of rows by name; to be asked for between two steps."""
        ...

    def load_state_dict(self, state: dict[str, Any], held: dict[str, list[DataProto]]) -> None: ...


class Trainer:
    """The state of a run, and its step. A resume needs ``state_dict`` and the state of the execution."""

    def __init__(self, config: Config, execution: Models, tokenizer: Any, examples: Sequence[Example]) -> None:
        self.config = config
        self.algorithm = config.algorithm
        self.execution = execution
        self.tokenizer = tokenizer
        self.collector = Collector(config, execution, tokenizer, examples)
        self.pipeline = (
            Flow(self.collector, staleness=config.staleness)
            if config.staleness > 1
            else Pipeline(self.collector, staleness=config.staleness, overlaps=execution.overlaps)
        )
        self.states = States(self.algorithm)
        self.step_number = 0
        self.generated_tokens = 0

    @property
    def steps(self) -> int:
        return self.config.steps

    def step(self) -> Step:
        """One step: a full batch of kept groups, and the updates on it."""
        self.step_number += 1
        clock = Clock()
        collected = self.pipeline.take()
        if self.step_number < self.config.steps:
            self.pipeline.begin_next()
        self.generated_tokens += int(collected.metrics["generated_tokens"])
        batch = join(collected.groups, pad_token_id=self.execution.pad_token_id)
        batch = self._measure(batch, clock)
        batch, metrics = self._estimate(batch)
        metrics |= self._describe(batch)
        metrics |= self._update(batch, clock)
        with clock("wait"):
            self.pipeline.wait()
        if self.step_number == self.config.steps:
            self.pipeline.close()
        with clock("sync"):
            self.execution.sync_weights()
        metrics |= collected.metrics | clock.metrics(int(collected.metrics["generated_tokens"]))
        return Step(self.step_number, batch, collected.dropped, collected.surplus, metrics)

    def _measure(self, batch: DataProto, clock: Clock) -> DataProto:
        """Log-probs and values before the update: those that the algorithm and the staleness metrics need."""
        needs, columns = self.algorithm.needs, rollout_ids(batch)
        with clock("log_probs"):
            if "old_log_probs" in needs or self.config.staleness:
                every = self.config.recompute_log_probs
                columns["old_log_probs"] = old_log_probs(self.execution, batch, step=self.step_number, every=every)
            if "ref_log_probs" in needs:
                columns["ref_log_probs"] = self.execution.log_probs(batch, reference=True)
            if needs & TAUGHT:
                columns |= lessons(self.execution, self.config, self.tokenizer, batch)
            if "values" in needs:
                columns["values"] = self.execution.values(batch)
            columns |= self.states.kl(self.execution, batch.union(DataProto.from_dict(tensors=columns)))
        return batch.union(DataProto.from_dict(tensors=columns))

    def _estimate(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Rewards, advantages and returns; the KL controller reads the batch after its coefficient was used."""
        controller: KLController | None = self.states.objects.get("kl_in_reward")
        metrics, baseline = dict[str, float](), self.states.baseline(batch)
        data = dict(batch.batch.items()) | baseline
        turns_earn = "turn_rewards" in data  # estimators of turns get these apart from the outcome
        if turns_earn:
            data["shaped_scores"] = outcome_scores(
                *(data[n] for n in ("shaped_scores", "turn_rewards", "trajectory_ids"))
            )
        kl_coef = controller.value if controller else 0.0
        estimated = estimate_advantages(self.algorithm, data, kl_coef=kl_coef, turns_earn=turns_earn)
        if controller is not None:
            metrics["kl_coef"] = controller.value
            drift = estimate_kl(batch["old_log_probs"] - batch["ref_log_probs"], "k1")
            controller.update(float(sequence_sum(drift, batch["response_mask"]).mean()), len(batch))
        self.states.learn(batch)
        estimated |= baseline
        estimated |= {
            name: column
            for name, column in mask_turns(self.algorithm, {**data, **estimated}).items()
            if name != "response_mask"  # what was sampled stays on record: the updates alone are made without it
        }
        return batch.union(DataProto.from_dict(tensors=estimated)), metrics

    def _update(self, batch: DataProto, clock: Clock) -> dict[str, float]:
        """Epochs of mini-batches of whole groups; during the critic's warm-up the critic alone."""
        policy: list[UpdateReport] = []
        critic: list[UpdateReport] = []
        batch, algorithm = batch[:], self.states.of_this_step
        for name, column in mask_turns(self.algorithm, dict(batch.batch.items())).items():
            batch[name] = column
        with clock("update"):
            for epoch in range(self.algorithm.epochs):
                for mini in self._mini_batches(batch, epoch):
                    if self.algorithm.value_loss is not None:
                        critic.append(self.execution.update_critic(mini, algorithm))
                    if self.step_number > self.config.critic.warmup_steps or not critic:
                        weighed = self._weigh(mini, update=len(policy))
                        policy.append(self.execution.update(weighed, algorithm))
        metrics = self.states.metrics() | summarize(policy)
        self.states.measured(metrics)
        metrics |= {f"critic/{name}": value for name, value in summarize(critic).items()}
        return metrics | {"skipped_updates": float(sum(report.skipped for report in policy + critic))}

    def _weigh(self, batch: DataProto, *, update: int) -> DataProto:
        """Corrections and token selections of one update, made of all its tokens and the policy before it."""
        needs, data = self.algorithm.token_weight_needs, dict(batch.batch.items())
        if "log_probs" in needs:
            data["log_probs"] = self.execution.log_probs(batch) if update else batch["old_log_probs"]
        if "entropies" in needs:
            data["entropies"] = self.execution.entropies(batch)
        draw = (
            2**62 + self.step_number * self.algorithm.updates_per_batch + update
        )  # a range of numbers that only this uses
        generator = torch.Generator().manual_seed(int(self._random_bits(draw).random_raw()) >> 1)
        return batch.union(DataProto.from_dict(tensors=token_weights(self.algorithm, data, generator=generator)))

    def _mini_batches(self, batch: DataProto, epoch: int) -> Iterator[DataProto]:
        count, labels = self.algorithm.mini_batches, dense_ids(batch["group"]).numpy()
        if count == 1:
            yield batch
            return
        shuffle = 2**63 + self.step_number * self.algorithm.epochs + epoch  # the upper half: the lower is PromptOrder's
        groups = np.random.Generator(self._random_bits(shuffle)).permutation(labels.max() + 1)
        for part in np.array_split(groups, count):
            mini = batch.select_idxs(np.concatenate([np.flatnonzero(labels == group) for group in part]))
            mini["group_ids"] = dense_ids(mini["group"])
            if "trajectory_ids" in mini:
                mini["trajectory_ids"] = dense_ids(mini["trajectory_ids"])
            yield mini

    def _random_bits(self, number: int) -> np.random.Philox:
        """A function of (the run's seed, number): there is no state to restore."""
        return np.random.Philox(key=np.array([self.config.seed, number], dtype=np.uint64))

    def _describe(self, batch: DataProto) -> dict[str, float]:
        mask = batch["response_mask"]
        metrics = responses(batch)
        metrics["trained_score"] = metrics.pop("score")
        metrics["truncated"] = diagnostics.share(batch["ended"] == Ended.LENGTH)
        for code in set(batch["ended"].tolist()) - {Ended.STOP, Ended.LENGTH}:
            metrics[f"ended/{Ended(code).label}"] = diagnostics.share(batch["ended"] == code)
        metrics["advantage_abs"] = diagnostics.token_mean(batch["advantages"].abs(), mask)
        if "old_log_probs" in batch:
            metrics |= diagnostics.sampler_mismatch(batch["old_log_probs"], batch["rollout_log_probs"], mask)
            metrics |= largest_mismatch(batch)
        if "teacher_log_probs" in batch:  # an estimate of KL(student || teacher), before the update
            gap = batch["rollout_log_probs"] - batch["teacher_log_probs"]
            metrics["teacher_kl"] = diagnostics.token_mean(gap, mask)
        if "teacher_mask" in batch:
            metrics["taught"] = diagnostics.share(batch["teacher_mask"].any(-1))
        if "returns" in batch:
            metrics["explained_variance"] = diagnostics.explained_variance(batch["values"], batch["returns"], mask)
        age = self.execution.weights_version - batch["weights_version"]
        described = {name: float(metric.value()) for name, metric in metrics.items()}
        return described | {"staleness": float(age.float().mean()), "staleness_max": float(age.max())}

    def state_dict(self) -> tuple[dict[str, Any], dict[str, list[DataProto]]]:
        """JSON values, and the groups that wait, by name; call it between two steps."""
        state, held = self.pipeline.state_dict()
        counters = {"step_number": self.step_number, "generated_tokens": self.generated_tokens}
        held = {**held, "answers": list(self.states.answers.values())}
        return {**counters, **state, "states": self.states.state_dict()}, held

    def load_state_dict(self, state: dict[str, Any], held: dict[str, list[DataProto]]) -> None:
        self.step_number, self.generated_tokens = state["step_number"], state["generated_tokens"]
        self.pipeline.load_state_dict(state, held)
        self.states.load_state_dict(state["states"], held.get("answers", []))


Hook: TypeAlias = Callable[[Any, Step], None]
"""Called with the trainer after each step."""


def train(trainer: Stepper, hooks: Sequence[Hook], *, stop: Callable[[], bool] = lambda: False) -> None:
    """Run steps until the configured number is done, or ``stop`` returns True between two steps."""
    while trainer.step_number < trainer.steps and not stop():
        step = trainer.step()
        for hook in hooks:
            hook(trainer, step)
