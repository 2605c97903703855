"""The loop, as in the papers: generate, score, filter, shape, log-probs, values, advantage, update, sync.

:class:`rlprims.trainer.collect.collector.Collector` does the first four; this module does the rest. Hooks, which are
called after each step, do everything else in a run: evaluation, checkpoints, progress, logs.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.algorithms import estimate_advantages, mask_turns, token_weights
from rlprims.controllers import KLController
from rlprims.data_proto import DataProto
from rlprims.execution import Execution, Models, UpdateReport
from rlprims.grouping import dense_ids
from rlprims.layout import sequence_sum
from rlprims.ratios import estimate_kl
from rlprims.runs.metrics import Clock, summarize
from rlprims.runs.steps import Step
from rlprims.trainer.collect.collector import Collector
from rlprims.trainer.collect.episodes import outcome_scores, rollout_ids
from rlprims.trainer.collect.flow import Flow
from rlprims.trainer.collect.pipeline import Pipeline
from rlprims.trainer.collect.rollout import join_groups
from rlprims.trainer.config import Config
from rlprims.trainer.data import Example
from rlprims.trainer.metrics import batch_metrics
from rlprims.trainer.states import States
from rlprims.trainer.teacher import TEACHER_COLUMNS, teacher_columns

_TOLERANCE = 1e-3
"""The largest allowed difference, in nats, between the log-probs of one token in the sampler and in the trainer."""


def old_log_probs(execution: Execution, batch: DataProto, *, step: int, every: int) -> Tensor:
    """The policy's log-probs before the update: computed in the first step and in every ``every``-th after it.

    The other steps use the sampler's log-probs, unless a row was sampled with other weights. A step that computes them
    compares both.

    Raises:
        ValueError: they differ by more than 1e-3 nats.
    """
    sampled: Tensor = batch["rollout_log_probs"]
    same_weights = bool((batch["weights_version"] == execution.weights_version).all())
    if every == 1 or not same_weights:
        return execution.log_probs(batch)
    if (step - 1) % every:
        return sampled
    computed = execution.log_probs(batch)
    gap = float((computed - sampled)[batch["response_mask"]].abs().max())
    if not gap <= _TOLERANCE:
        raise ValueError(
            f"step {step}: log-probs of the sampler and of the trainer differ by {gap:.3g} nats, more than "
            f"{_TOLERANCE}: set recompute_log_probs: 1"
        )
    return computed


class Trainer:
    """The state of a run and its step. A checkpoint has ``state_dict`` and the state of the execution."""

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
            self.pipeline.prefetch()
        self.generated_tokens += int(collected.metrics["generated_tokens"])
        batch = join_groups(collected.groups, pad_token_id=self.execution.pad_token_id)
        batch = self._measure(batch, clock)
        batch, metrics = self._estimate(batch)
        metrics |= batch_metrics(batch, weights_version=self.execution.weights_version)
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
            if needs & TEACHER_COLUMNS:
                columns |= teacher_columns(self.execution, self.config, self.tokenizer, batch)
            if "values" in needs:
                columns["values"] = self.execution.values(batch)
            columns |= self.states.kl(self.execution, batch.union(DataProto.from_dict(tensors=columns)))
        return batch.union(DataProto.from_dict(tensors=columns))

    def _estimate(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Rewards, advantages and returns; the KL controller is updated after its coefficient was used."""
        controller: KLController | None = self.states.objects.get("kl_in_reward")
        metrics, baseline = dict[str, float](), self.states.baseline(batch)
        data = dict(batch.batch.items()) | baseline
        turns_earn = "turn_rewards" in data  # estimators get these separately from the outcome
        if turns_earn:
            columns = (data[name] for name in ("shaped_scores", "turn_rewards", "trajectory_ids"))
            data["shaped_scores"] = outcome_scores(*columns)
        kl_coef = controller.value if controller else 0.0
        estimated = estimate_advantages(self.algorithm, data, kl_coef=kl_coef, turns_earn=turns_earn)
        if controller is not None:
            metrics["kl_coef"] = controller.value
            drift = estimate_kl(batch["old_log_probs"] - batch["ref_log_probs"], "k1")
            controller.update(float(sequence_sum(drift, batch["response_mask"]).mean()), len(batch))
        self.states.update_baseline(batch)
        estimated |= baseline
        estimated |= {
            name: column
            for name, column in mask_turns(self.algorithm, {**data, **estimated}).items()
            if name != "response_mask"  # the records keep all that was sampled; only the updates leave it out
        }
        return batch.union(DataProto.from_dict(tensors=estimated)), metrics

    def _update(self, batch: DataProto, clock: Clock) -> dict[str, float]:
        """Epochs of mini-batches of whole groups. During the critic's warm-up only the critic is updated."""
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
                        weighted = self._with_token_weights(mini, update=len(policy))
                        policy.append(self.execution.update(weighted, algorithm))
        metrics = self.states.metrics() | summarize(policy)
        self.states.update_controllers(metrics)
        metrics |= {f"critic/{name}": value for name, value in summarize(critic).items()}
        return metrics | {"skipped_updates": float(sum(report.skipped for report in policy + critic))}

    def _with_token_weights(self, batch: DataProto, *, update: int) -> DataProto:
        """The batch of one update with its corrections and token selections, by the policy before the update."""
        needs, data = self.algorithm.token_weight_needs, dict(batch.batch.items())
        if "log_probs" in needs:
            data["log_probs"] = self.execution.log_probs(batch) if update else batch["old_log_probs"]
        if "entropies" in needs:
            data["entropies"] = self.execution.entropies(batch)
        draw = 2**62 + self.step_number * self.algorithm.updates_per_batch + update  # a range of its own
        generator = torch.Generator().manual_seed(int(self._random_bits(draw).random_raw()) >> 1)
        return batch.union(DataProto.from_dict(tensors=token_weights(self.algorithm, data, generator=generator)))

    def _mini_batches(self, batch: DataProto, epoch: int) -> Iterator[DataProto]:
        count, labels = self.algorithm.mini_batches, dense_ids(batch["group"]).numpy()
        if count == 1:
            yield batch
            return
        shuffle = 2**63 + self.step_number * self.algorithm.epochs + epoch  # PromptOrder uses the lower half
        groups = np.random.Generator(self._random_bits(shuffle)).permutation(labels.max() + 1)
        for part in np.array_split(groups, count):
            mini = batch.select_idxs(np.concatenate([np.flatnonzero(labels == group) for group in part]))
            mini["group_ids"] = dense_ids(mini["group"])
            if "trajectory_ids" in mini:
                mini["trajectory_ids"] = dense_ids(mini["trajectory_ids"])
            yield mini

    def _random_bits(self, number: int) -> np.random.Philox:
        """Random bits as a function of (seed, number), so that there is no state to restore."""
        return np.random.Philox(key=np.array([self.config.seed, number], dtype=np.uint64))

    def state_dict(self) -> tuple[dict[str, Any], dict[str, list[DataProto]]]:
        """JSON values, and the groups that wait, by name; call it between two steps."""
        state, groups = self.pipeline.state_dict()
        counters = {"step_number": self.step_number, "generated_tokens": self.generated_tokens}
        groups = {**groups, "answers": list(self.states.answers.values())}
        return {**counters, **state, "states": self.states.state_dict()}, groups

    def load_state_dict(self, state: dict[str, Any], groups: dict[str, list[DataProto]]) -> None:
        self.step_number, self.generated_tokens = state["step_number"], state["generated_tokens"]
        self.pipeline.load_state_dict(state, groups)
        self.states.load_state_dict(state["states"], groups.get("answers", []))
