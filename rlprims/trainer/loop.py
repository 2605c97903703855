"""The loop, as in the papers: generate, score, filter, shape, log-probs, values, advantage, update, sync.

Everything else about a run (evaluation, checkpoints, progress, logs) enters through hooks, called after each step.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from rlprims import diagnostics
from rlprims.algorithms import estimate_advantages, weigh_tokens
from rlprims.controllers import KLController
from rlprims.data_proto import DataProto
from rlprims.divergence import estimate_kl
from rlprims.execution import Execution, UpdateReport
from rlprims.filters import DynamicSampling
from rlprims.grouping import dense_ids
from rlprims.masking import sequence_sum
from rlprims.trainer.config import Config
from rlprims.trainer.data import Example, PromptOrder
from rlprims.trainer.measures import Clock, summarize
from rlprims.trainer.rollout import join, prompt_rows, respond, score, split_groups, with_baseline


@dataclass
class Step:
    """What happened in one step."""

    number: int
    batch: DataProto
    """The rows that were trained on, with their advantages."""
    dropped: list[tuple[DataProto, str]]
    """The groups that were not, each with the reason; greedy baselines have theirs too."""
    surplus: list[DataProto]
    """The groups that were sampled in this step and wait for the next."""
    metrics: dict[str, float] = field(default_factory=dict)


class Trainer:
    """The state of a run and its step. ``state_dict`` and the surplus groups are all that a resume needs beside the
    execution's own."""

    def __init__(self, config: Config, execution: Execution, tokenizer: Any, examples: Sequence[Example]) -> None:
        self.config = config
        self.algorithm = config.algorithm
        self.execution = execution
        self.tokenizer = tokenizer
        self.examples = examples
        self.prompt_width = max(len(example.prompt_ids) for example in examples)
        self.order = PromptOrder(len(examples), seed=config.seed, shuffle=config.data.shuffle)
        limits = self.algorithm.filter
        self.sampling: DynamicSampling[DataProto] = DynamicSampling(
            groups=config.prompts_per_step,
            # Without a filter only groups with a score that is not a number are dropped.
            max_generation_batches=limits.max_generation_batches if limits else 10,
            at_limit=limits.at_limit if limits else "error",
        )
        kl = self.algorithm.kl_in_reward
        self.kl_controller: KLController | None = kl.controller({}) if kl else None
        self.step_number = 0
        self.samples = 0
        self.groups = 0
        self.generated_tokens = 0
        self.sampled_scores: defaultdict[str, list[float]] = defaultdict(list)
        self.failures: Counter[str] = Counter()

    def step(self) -> Step:
        """One step: a full batch of kept groups, and the updates on it."""
        self.step_number += 1
        clock = Clock()
        dropped: list[tuple[DataProto, str]] = []
        before, first_group = self.generated_tokens, self.groups
        self.sampled_scores.clear()
        self.failures.clear()
        while not self.sampling.full:
            self._sample(clock, dropped)
        metrics = self._sampling_metrics(self.generated_tokens - before)
        metrics |= {name: float(np.mean(values)) for name, values in self.sampled_scores.items() if values}
        batch = join(self.sampling.take())
        batch = self._measure(batch, clock)
        batch = self._estimate(batch)
        metrics |= self._describe(batch)
        metrics |= self._update(batch, clock)
        with clock("sync"):
            self.execution.sync_weights()
        metrics |= clock.metrics(self.generated_tokens - before)
        surplus = [group for group in self.sampling.surplus if int(group["group"][0]) >= first_group]
        return Step(self.step_number, batch, dropped, surplus, metrics)

    def _sample(self, clock: Clock, dropped: list[tuple[DataProto, str]]) -> None:
        """One generation batch: its groups go to the accumulator, or to ``dropped`` with the reason."""
        config, size = self.config, self.algorithm.group_size
        examples = [self.examples[i] for i in self.order.take(config.prompts_per_generation or config.prompts_per_step)]
        groups = range(self.groups, self.groups + len(examples))
        self.groups += len(examples)

        with clock("generate"):
            rows = self._respond(examples, groups, copies=size)
        with clock("score"):
            rows = score(self.execution, config, rows)
        self.failures.update(failure.partition(": ")[0] for failure in rows["failure"] if failure is not None)
        for name in {"scores", *config.score_parts} & rows.batch.keys():
            metric = "score" if name == "scores" else f"score/{name}"
            self.sampled_scores[metric] += rows[name][rows[name].isfinite()].tolist()
        if "baseline_scores" in self.algorithm.needs:
            with clock("generate"):
                greedy = self._respond(examples, groups, copies=1, greedy=True)
            with clock("score"):
                greedy = score(self.execution, config, greedy)
            rows = with_baseline(rows, greedy, size)
            dropped.append((greedy, "greedy baseline"))
        kept, reasons = split_groups(self.algorithm, rows, leave_out=config.unscored == "leave_out")
        self.sampling.add(kept, reasons)
        dropped += [(group, reason) for group, reason in zip(kept, reasons, strict=True) if reason is not None]

    def _respond(self, examples: list[Example], groups: range, *, copies: int, greedy: bool = False) -> DataProto:
        rows = prompt_rows(examples, groups, copies=copies, first_sample=self.samples)
        self.samples += len(rows)
        sampling = self.config.sampling.greedy() if greedy else self.config.sampling
        rows = respond(
            self.execution, self.tokenizer, rows, sampling, seed=self.config.seed, prompt_width=self.prompt_width
        )
        self.generated_tokens += int(rows["response_mask"].sum())
        return rows

    def _measure(self, batch: DataProto, clock: Clock) -> DataProto:
        """Log-probs and values before the update: those that some signature asks for."""
        needs, columns = self.algorithm.needs, {"group_ids": dense_ids(batch["group"])}
        with clock("log_probs"):
            if "old_log_probs" in needs:
                columns["old_log_probs"] = self.execution.log_probs(batch)
            if "ref_log_probs" in needs:
                columns["ref_log_probs"] = self.execution.log_probs(batch, reference=True)
            if "values" in needs:
                columns["values"] = self.execution.values(batch)
        return batch.union(DataProto.from_dict(tensors=columns))

    def _estimate(self, batch: DataProto) -> DataProto:
        """Rewards, advantages and returns; the KL controller reads the batch after its coefficient was used."""
        controller = self.kl_controller
        data = dict(batch.batch.items())
        estimated = estimate_advantages(self.algorithm, data, kl_coef=controller.value if controller else 0.0)
        if controller is not None:
            drift = estimate_kl(batch["old_log_probs"] - batch["ref_log_probs"], "k1")
            controller.update(float(sequence_sum(drift, batch["response_mask"]).mean()), len(batch))
        return batch.union(DataProto.from_dict(tensors=estimated))

    def _update(self, batch: DataProto, clock: Clock) -> dict[str, float]:
        """Epochs of mini-batches of whole groups; during the critic's warm-up the critic alone."""
        policy: list[UpdateReport] = []
        critic: list[UpdateReport] = []
        with clock("update"):
            for epoch in range(self.algorithm.epochs):
                for mini in self._mini_batches(batch, epoch):
                    if self.algorithm.value_loss is not None:
                        critic.append(self.execution.update_critic(mini, self.algorithm))
                    if self.step_number > self.config.critic.warmup_steps or not critic:
                        weighed = self._weigh(mini, update=len(policy))
                        policy.append(self.execution.update(weighed, self.algorithm))
        metrics = summarize(policy) | {f"critic/{name}": value for name, value in summarize(critic).items()}
        return metrics | {"skipped_updates": float(sum(report.skipped for report in policy + critic))}

    def _weigh(self, batch: DataProto, *, update: int) -> DataProto:
        """Corrections and token selections of one update, made of all its tokens and the policy before it."""
        needs, data = self.algorithm.weighing_needs, dict(batch.batch.items())
        if "log_probs" in needs:
            data["log_probs"] = self.execution.log_probs(batch) if update else batch["old_log_probs"]
        if "entropies" in needs:
            data["entropies"] = self.execution.entropies(batch)
        draw = 2**62 + self.step_number * self.algorithm.updates_per_batch + update  # a quarter that is nobody else's
        generator = torch.Generator().manual_seed(int(self._random_bits(draw).random_raw()) >> 1)
        return batch.union(DataProto.from_dict(tensors=weigh_tokens(self.algorithm, data, generator=generator)))

    def _mini_batches(self, batch: DataProto, epoch: int) -> Iterator[DataProto]:
        count, size = self.algorithm.mini_batches, self.algorithm.group_size
        if count == 1:
            yield batch
            return
        shuffle = 2**63 + self.step_number * self.algorithm.epochs + epoch  # the upper half: the lower is PromptOrder's
        groups = np.random.Generator(self._random_bits(shuffle)).permutation(len(batch) // size)
        for part in np.array_split(groups, count):
            rows = np.concatenate([np.arange(group * size, (group + 1) * size) for group in part])
            mini = batch.select_idxs(rows)
            mini["group_ids"] = dense_ids(mini["group"])
            yield mini

    def _random_bits(self, number: int) -> np.random.Philox:
        """A function of (the run's seed, number): there is no state to restore."""
        return np.random.Philox(key=np.array([self.config.seed, number], dtype=np.uint64))

    def _describe(self, batch: DataProto) -> dict[str, float]:
        mask = batch["response_mask"]
        scored = batch["scores"].isfinite()
        metrics = diagnostics.responses(batch["scores"][scored], mask[scored])
        metrics["trained_score"] = metrics.pop("score")
        metrics["truncated"] = diagnostics.share(batch["truncated"])
        metrics["advantage_abs"] = diagnostics.token_mean(batch["advantages"].abs(), mask)
        if "old_log_probs" in batch:
            metrics |= diagnostics.sampler_mismatch(batch["old_log_probs"], batch["rollout_log_probs"], mask)
        if "returns" in batch:
            metrics["explained_variance"] = diagnostics.explained_variance(batch["values"], batch["returns"], mask)
        return {name: float(metric.value()) for name, metric in metrics.items()}

    def _sampling_metrics(self, generated: int) -> dict[str, float]:
        sampling, controller = self.sampling, self.kl_controller
        dropped = sum(sampling.dropped.values())
        metrics = {
            "generation_batches": sampling.generation_batches,
            "groups_sampled": sampling.sampled,
            "groups_dropped": dropped,
            "groups_failed": sampling.dropped["a score is not finite"],
            "filter_yield": 1 - dropped / max(1, sampling.sampled),
            "surplus": max(0, len(sampling.surplus) - sampling.groups),
            "generated_tokens": generated,
            "generated_tokens_total": self.generated_tokens,
        }
        metrics |= {f"failures/{cause}": count for cause, count in self.failures.items()}
        return metrics | ({"kl_coef": controller.value} if controller else {})

    def state_dict(self) -> dict[str, Any]:
        """All of the trainer's state but the surplus groups, as JSON values."""
        counters = {name: getattr(self, name) for name in ("step_number", "samples", "groups", "generated_tokens")}
        controller = self.kl_controller.state_dict() if self.kl_controller else None
        return {**counters, "prompt_position": self.order.position, "kl_controller": controller}

    def load_state_dict(self, state: dict[str, Any], surplus: list[DataProto]) -> None:
        for name in ("step_number", "samples", "groups", "generated_tokens"):
            setattr(self, name, state[name])
        self.order.position = state["prompt_position"]
        if self.kl_controller is not None:
            self.kl_controller.load_state_dict(state["kl_controller"])
        self.sampling.surplus = surplus


Hook: TypeAlias = Callable[[Trainer, Step], None]


def train(trainer: Trainer, hooks: Sequence[Hook], *, stop: Callable[[], bool] = lambda: False) -> None:
    """Steps until the configured number is done, or ``stop`` says so between two of them."""
    while trainer.step_number < trainer.config.steps and not stop():
        step = trainer.step()
        for hook in hooks:
            hook(trainer, step)
