"""See :class:`RayExecution`."""

import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ray.util.placement_group import remove_placement_group
from torch import Tensor
from transformers import GenerationConfig

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution._config import ModelConfig, OptimizerConfig, RayConfig, Sampling
from rlprims.execution._protocol import UpdateReport
from rlprims.execution.hf import special_ids, with_totals
from rlprims.execution.hf._models import device_of
from rlprims.execution.ray._cluster import CPU_ENVIRONMENT, WORKER_ENVIRONMENT, connect, reserve
from rlprims.execution.ray._rollout_worker import RolloutWorker
from rlprims.execution.ray._rollouts import Rollouts
from rlprims.execution.ray._training_worker import TrainingWorker
from rlprims.execution.ray._worker_group import WorkerGroup, fetch, start_worker
from rlprims.types import merge_metrics

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}
"""How far the engine's log-probs of the probe may be from the trainer's, in nats; wrong weights are off by more."""


class RayExecution:
    """The :class:`rlprims.execution.Execution` of a cluster.

    Training ranks hold the policy, its reference and its critic; rollout workers hold an engine each. The driver sends
    a batch's rows where they are needed, and weights by reference.
    """

    def __init__(
        self,
        cluster: RayConfig,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        algorithm: Algorithm,
        tokenizer: Any,
        temperature: float,
        updates: int,
        critic_optimizer: OptimizerConfig | None = None,
        critic_updates: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.pad_token_id, _ = special_ids(GenerationConfig.from_pretrained(model.path), tokenizer)
        self.tolerance = _TOLERANCE[model.dtype]
        self.version = 0
        cpus, gpus = cluster.cpus_per_worker, cluster.gpus_per_worker
        size = cluster.training_workers + cluster.rollout_workers
        connect(cluster.address, cpus=size * cpus)
        self.room = reserve(size, cpus=cpus, gpus=gpus, strategy=cluster.placement, timeout=cluster.start_timeout)
        on_cpu = device_of(model).type == "cpu" and not gpus
        place: dict[str, Any] = {
            "placement_group": self.room,
            "cpus": cpus,
            "gpus": gpus,
            "environment": {**WORKER_ENVIRONMENT, **(CPU_ENVIRONMENT if on_cpu else {})},
        }
        # Ranks before engines: an engine takes what memory is left.
        self.trainers = WorkerGroup(
            TrainingWorker, cluster.training_workers, name="training", timeout=cluster.call_timeout, **place
        )
        options = {
            "algorithm": algorithm,
            "temperature": temperature,
            "updates": updates,
            "critic_optimizer": critic_optimizer,
            "critic_updates": critic_updates,
        }
        address = self.trainers.call(TrainingWorker.address).result(cluster.start_timeout)
        building = self.trainers.call(TrainingWorker.build, address, cluster, model, optimizer, options)
        self.context_window = window = building.result(cluster.start_timeout)[0]

        def start(rank: int) -> Any:
            bundle = cluster.training_workers + rank
            worker = start_worker(RolloutWorker, bundle, size, **place)
            built = worker.build.remote(cluster, model, tokenizer, window)
            fetch(built, f"rollout worker {rank}", cluster.start_timeout)
            return worker

        self.rollouts = Rollouts(
            start, cluster.rollout_workers, timeout=cluster.call_timeout, max_replacements=cluster.max_replacements
        )
        self._release = weakref.finalize(self, _release, self.rollouts, self.trainers, self.room)
        self._release.atexit = False  # Ray ends its own processes
        self.sync_weights()

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int) -> DataProto:
        return self.rollouts.generate(prompts, sampling, seed, prompt_width)

    def log_probs(self, batch: DataProto, *, reference: bool = False) -> Tensor:
        return self._measured(TrainingWorker.log_probs, batch, reference=reference)

    def entropies(self, batch: DataProto) -> Tensor:
        return self._measured(TrainingWorker.entropies, batch)

    def values(self, batch: DataProto) -> Tensor:
        return self._measured(TrainingWorker.values, batch)

    def reward_scores(self, batch: DataProto) -> Tensor:
        return self._measured(TrainingWorker.reward_scores, batch)

    def update(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        return self._learned(TrainingWorker.update, batch, algorithm)

    def update_critic(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        return self._learned(TrainingWorker.update_critic, batch, algorithm)

    def sync_weights(self) -> None:
        """The newest weights to every engine, and proof that they have arrived."""
        pending = self.trainers.call(TrainingWorker.weights)
        pending.result()
        probe = _probe(self.context_window, len(self.tokenizer))
        expected = self.trainers.call(TrainingWorker.probe, _probe_batch(probe)).result()[0][0]
        self.version += 1
        # The driver owns the reference, so the weights outlive the rank that gathered them.
        self.rollouts.sync(pending.refs[0], self.version, probe, partial(_compare, expected, self.tolerance))

    def save(self, directory: Path) -> None:
        self.trainers.call(TrainingWorker.save, directory.resolve()).result()
        self.tokenizer.save_pretrained(directory / "policy")

    def load(self, directory: Path) -> None:
        self.trainers.call(TrainingWorker.load, directory.resolve()).result()
        self.sync_weights()

    def close(self) -> None:
        self._release()

    def _measured(self, method: Any, batch: DataProto, **options: Any) -> Tensor:
        measured: Tensor = self.trainers.call(method, batch, **options).result()
        return measured

    def _learned(self, method: Any, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        whole, totals = with_totals(batch)
        reports: list[UpdateReport] = self.trainers.call(method, whole, algorithm, totals).result()
        return reports[0]._replace(
            loss=sum(report.loss for report in reports), metrics=merge_metrics(*(report.metrics for report in reports))
        )


def _release(rollouts: Rollouts, trainers: WorkerGroup, room: Any) -> None:
    rollouts.stop()
    trainers.stop()
    remove_placement_group(room)


def _probe(context_window: int, vocabulary: int) -> list[int]:
    """Tokens that every engine can score: sixteen, spread over the vocabulary."""
    return [token * vocabulary // 16 for token in range(min(16, context_window - 1))]


def _probe_batch(probe: Sequence[int]) -> DataProto:
    tokens = torch.tensor([probe])
    return DataProto.from_dict(
        tensors={
            "prompts": tokens[:, :1],
            "responses": tokens[:, 1:],
            "attention_mask": torch.ones_like(tokens, dtype=torch.bool),
            "response_mask": torch.ones_like(tokens[:, 1:], dtype=torch.bool),
        }
    )


def _compare(expected: Tensor, tolerance: float, scores: Sequence[float]) -> str | None:
    """What is wrong with an engine's scores of the probe, or None."""
    apart = float((torch.tensor(scores) - expected).abs().max())
    return None if apart <= tolerance else f"log-probs of the probe are {apart:.3g} nats from the trainer's"
