"""What a step does to a batch: log-probs and values, advantages, and the updates on its mini-batches."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.algorithms import Algorithm, estimate_advantages, mask_turns, token_weights
from rlprims.controllers import KLController
from rlprims.data_proto import DataProto
from rlprims.execution import Execution, Models, UpdateReport
from rlprims.grouping import dense_ids
from rlprims.layout import sequence_sum
from rlprims.ratios import estimate_kl
from rlprims.runs.metrics import summarize
from rlprims.trainer.config import Config
from rlprims.trainer.scoring.columns import outcome_scores, rollout_ids
from rlprims.trainer.stateful import States
from rlprims.trainer.teacher import TEACHER_COLUMNS, teacher_columns


def measure(
    config: Config, execution: Models, tokenizer: Any, states: States, batch: DataProto, *, step: int
) -> DataProto:
    """The batch with log-probs and values before the update: those that the algorithm and the metrics need."""
    needs, columns = config.algorithm.needs, rollout_ids(batch)
    if "old_log_probs" in needs or config.max_staleness or config.old_groups.share:
        columns["old_log_probs"] = old_log_probs(execution, batch, step=step, every=config.recompute_log_probs_every)
    if "ref_log_probs" in needs:
        columns["ref_log_probs"] = execution.log_probs(batch, reference=True)
    if needs & TEACHER_COLUMNS:
        columns |= teacher_columns(execution, config, tokenizer, batch)
    if "values" in needs:
        columns["values"] = execution.values(batch)
    columns |= states.kl(execution, batch.union(DataProto.from_dict(tensors=columns)))
    return batch.union(DataProto.from_dict(tensors=columns))


def old_log_probs(execution: Execution, batch: DataProto, *, step: int, every: int) -> Tensor:
    """The policy's log-probs before the update: computed in the first step and in every ``every``-th after it.

    The other steps use the sampler's log-probs, unless a row was sampled with other weights.
    """
    sampled: Tensor = batch["rollout_log_probs"]
    same_weights = bool((batch["weights_version"] == execution.weights_version).all())
    return sampled if (step - 1) % every and same_weights else execution.log_probs(batch)


def estimate(algorithm: Algorithm, states: States, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    """The batch with rewards, advantages and returns, and metrics. Controller and baseline are then updated."""
    controller: KLController | None = states.objects.get("kl_in_reward")
    metrics, baseline = dict[str, float](), states.baseline(batch)
    data = dict(batch.batch.items()) | baseline
    turns_earn = "turn_rewards" in data  # estimators get these separately from the outcome
    if turns_earn:
        columns = (data[name] for name in ("shaped_scores", "turn_rewards", "trajectory_ids"))
        data["shaped_scores"] = outcome_scores(*columns)
    kl_coef = controller.value if controller else 0.0
    estimated = estimate_advantages(algorithm, data, kl_coef=kl_coef, turns_earn=turns_earn)
    if controller is not None:
        metrics["kl_coef"] = controller.value
        drift = estimate_kl(batch["old_log_probs"] - batch["ref_log_probs"], "k1")
        controller.update(float(sequence_sum(drift, batch["response_mask"]).mean()), len(batch))
    states.update_baseline(batch)
    estimated |= baseline
    estimated |= mask_turns(algorithm, {**data, **estimated})
    estimated.pop("response_mask", None)  # the records keep all that was sampled; only the updates leave it out
    return batch.union(DataProto.from_dict(tensors=estimated)), metrics


def update(
    config: Config, execution: Models, states: States, batch: DataProto, *, step: int
) -> tuple[dict[str, float], list[tuple[str, UpdateReport]]]:
    """Epochs of mini-batches of whole groups. During the critic's warm-up only the critic is updated."""
    policy: list[UpdateReport] = []
    critic: list[UpdateReport] = []
    batch, algorithm = batch[:], states.of_this_step
    for name, column in mask_turns(config.algorithm, dict(batch.batch.items())).items():
        batch[name] = column
    critic_updates = config.critic.updates_per_policy_update if algorithm.value_loss is not None else 0
    for epoch in range(algorithm.epochs):
        for mini in mini_batches(config, batch, step=step, epoch=epoch):
            for _ in range(critic_updates):
                critic.append(execution.update_critic(mini, algorithm))
            if step > config.critic.warmup_steps or not critic:
                weighted = with_token_weights(config, execution, mini, step=step, update=len(policy))
                policy.append(execution.update(weighted, algorithm))
    metrics = states.metrics() | summarize(policy)
    states.update_controllers(metrics)
    metrics |= {f"critic/{name}": value for name, value in summarize(critic).items()}
    metrics["skipped_updates"] = float(sum(report.skipped for report in policy + critic))
    return metrics, [*(("policy", report) for report in policy), *(("critic", report) for report in critic)]


def mini_batches(config: Config, batch: DataProto, *, step: int, epoch: int) -> Iterator[DataProto]:
    """The mini-batches of an epoch, each of whole groups in random order."""
    count, labels = config.algorithm.mini_batches, dense_ids(batch["group"]).numpy()
    if count == 1:
        yield batch
        return
    shuffle = 2**63 + step * config.algorithm.epochs + epoch  # the order of prompts uses the lower half
    groups = np.random.Generator(_random_bits(config, shuffle)).permutation(labels.max() + 1)
    for part in np.array_split(groups, count):
        mini = batch.select_idxs(np.concatenate([np.flatnonzero(labels == group) for group in part]))
        mini["group_ids"] = dense_ids(mini["group"])
        if "trajectory_ids" in mini:
            mini["trajectory_ids"] = dense_ids(mini["trajectory_ids"])
        yield mini


def with_token_weights(config: Config, execution: Models, batch: DataProto, *, step: int, update: int) -> DataProto:
    """The batch of one update with its corrections and token selections, by the policy before the update."""
    algorithm, data = config.algorithm, dict(batch.batch.items())
    if "log_probs" in algorithm.token_weight_needs:
        data["log_probs"] = execution.log_probs(batch) if update else batch["old_log_probs"]
    if "entropies" in algorithm.token_weight_needs:
        data["entropies"] = execution.entropies(batch)
    draw = 2**62 + step * algorithm.updates_per_batch + update  # a range of its own
    generator = torch.Generator().manual_seed(int(_random_bits(config, draw).random_raw()) >> 1)
    return batch.union(DataProto.from_dict(tensors=token_weights(algorithm, data, generator=generator)))


def _random_bits(config: Config, number: int) -> np.random.Philox:
    """Random bits as a function of (seed, number), so that there is no state to restore."""
    return np.random.Philox(key=np.array([config.seed, number], dtype=np.uint64))
