"""The ``Execution`` of a Ray cluster: FSDP2 ranks that train and vLLM engines that sample."""

import logging
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution._config import ModelConfig, OptimizerConfig, ProfileConfig, RayConfig, Sampling
from rlprims.execution._meter import WorkerReport
from rlprims.execution._profile import Profile
from rlprims.execution._protocol import UpdateReport
from rlprims.execution._version import load_version, save_version
from rlprims.execution.hf import special_ids, with_counts
from rlprims.execution.ray._cluster import connect
from rlprims.execution.ray._pools import reserve_pools, start_training
from rlprims.execution.ray._rollout_worker import RolloutWorker
from rlprims.execution.ray._rollouts import Rollouts
from rlprims.execution.ray._training_worker import TrainingWorker
from rlprims.execution.ray._turns import Turns
from rlprims.execution.ray._worker_group import WorkerGroup, WorkerLost, fetch, start_worker
from rlprims.types import merge_metrics

log = logging.getLogger(__name__)

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}
"""How far the engine's log-probs of the probe may be from the trainer's, in nats; wrong weights are off by more."""


class RayExecution:
    """The :class:`rlprims.execution.Execution` of a cluster.

    Training ranks hold the policy, its reference and its critic, in one pool or several; rollout workers hold an engine
    each. The driver sends a batch's rows where they are needed, and weights by reference.
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
        self.weights_version = 0
        self.roles = cluster.roles
        self.overlaps = not cluster.colocate
        connect(cluster.address, cpus=sum(pool.workers * pool.cpus for pool in cluster.all_pools.values()))
        options = {
            "algorithm": algorithm,
            "temperature": temperature,
            "updates": updates,
            "critic_optimizer": critic_optimizer,
            "critic_updates": critic_updates,
        }
        with ExitStack() as held:  # given back, newest first, if what follows fails
            self._start(cluster, model, optimizer, options, held)
            self._release = weakref.finalize(self, held.pop_all().close)
        self._release.atexit = False  # Ray ends its own processes

    def _start(
        self,
        cluster: RayConfig,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        options: dict[str, Any],
        held: ExitStack,
    ) -> None:
        places = reserve_pools(cluster, model, held)
        engines = cluster.roles.rollout
        count = cluster.rollout_workers if engines == "main" else cluster.pools[engines].workers
        before = cluster.training_workers if engines == "main" and not cluster.colocate else 0

        def process(rank: int) -> Any:
            return start_worker(RolloutWorker, before + rank, before + count, **places[engines])

        # All processes at once, for each imports for seconds; ranks before engines, which take what memory is left.
        begun = [process(rank) for rank in reversed(range(count))]
        groups, window = start_training(cluster, model, optimizer, options, places, held)
        self.pools, self.trainers, self.context_window = groups, groups["main"], window
        if cluster.colocate:
            self.trainers.call(TrainingWorker.offload).result()
        tokenizer = self.tokenizer  # what is held until the end must not hold this object: it would never be collected

        def start(rank: int) -> tuple[Any, Any]:
            worker = begun.pop() if begun else process(rank)
            return worker, worker.build.remote(cluster, model, tokenizer, window)

        self.rollouts = Rollouts(
            start,
            count,
            timeout=cluster.call_timeout,
            start_timeout=cluster.start_timeout,
            max_replacements=cluster.max_replacements,
        )
        held.callback(self.rollouts.stop)
        self.turns = Turns(self.trainers, self.rollouts, cluster.sleep_level if cluster.colocate else None)
        if cluster.colocate and not self.rollouts.frees_memory:
            log.warning("ray.colocate: on this platform engines accept their sleep and free no memory by it")
        self.sync_weights()

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int) -> DataProto:
        self.turns.of_engines()
        return self.rollouts.generate(prompts, sampling, seed, prompt_width)

    def log_probs(self, batch: DataProto, *, reference: bool = False) -> Tensor:
        group = self.pools[self.roles.reference] if reference else self.trainers
        return self._measured(group, TrainingWorker.log_probs, batch, reference=reference)

    def entropies(self, batch: DataProto) -> Tensor:
        return self._measured(self.trainers, TrainingWorker.entropies, batch)

    def values(self, batch: DataProto) -> Tensor:
        return self._measured(self.pools[self.roles.critic], TrainingWorker.values, batch)

    def reward_scores(self, batch: DataProto) -> Tensor:
        return self._measured(self.pools[self.roles.reward], TrainingWorker.reward_scores, batch)

    def update(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        return self._learned(self.trainers, TrainingWorker.update, batch, algorithm)

    def update_critic(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        return self._learned(self.pools[self.roles.critic], TrainingWorker.update_critic, batch, algorithm)

    def sync_weights(self) -> None:
        """The newest weights to every engine, and proof that they have arrived."""
        self.turns.of_ranks()
        pending = self.trainers.call(TrainingWorker.weights)
        pending.result()
        probe = _probe(self.context_window, len(self.tokenizer))
        expected = self.trainers.call(TrainingWorker.probe, _probe_batch(probe)).result()[0][0]
        self.weights_version += 1
        self.turns.of_engines(resend=False)
        # The driver owns the reference, so the weights outlive the rank that gathered them.
        self.rollouts.sync(pending.refs[0], self.weights_version, probe, partial(_compare, expected, self.tolerance))

    def save(self, directory: Path) -> None:
        self.turns.of_ranks()
        for group in self.pools.values():
            group.call(TrainingWorker.save, directory.resolve()).result()
        self.tokenizer.save_pretrained(directory / "policy")
        save_version(directory, self.weights_version)

    def load(self, directory: Path) -> None:
        self.turns.of_ranks()
        for group in self.pools.values():
            group.call(TrainingWorker.load, directory.resolve()).result()
        self.weights_version = load_version(directory) - 1
        self.sync_weights()

    def reports(self) -> list[WorkerReport]:
        return list(self._ask_all("report").values())

    def start_profile(self, config: ProfileConfig) -> None:
        self._ask_all("start_profile", config)

    def stop_profile(self) -> dict[str, Profile]:
        return {name: profile for name, profile in self._ask_all("stop_profile").items() if profile is not None}

    def _ask_all(self, method: str, *args: Any) -> dict[str, Any]:
        """By name, every worker's answer. A lost one has none: what it is needed for will say so."""
        groups = {group.name: group for group in self.pools.values()} | {"rollout": self.rollouts}
        workers = {f"{name}_{i}": w for name, group in groups.items() for i, w in enumerate(group.workers)}
        asked = {name: getattr(worker, method).remote(name, *args) for name, worker in workers.items()}
        answers = {}
        for name, ref in asked.items():
            with suppress(WorkerLost):
                answers[name] = fetch(ref, name, self.trainers.timeout)
        return answers

    def close(self) -> None:
        self._release()

    def _measured(self, group: WorkerGroup, method: Any, batch: DataProto, **options: Any) -> Tensor:
        if group is self.trainers:
            self.turns.of_ranks()
        measured: Tensor = group.call(method, batch, **options).result()
        return measured

    def _learned(self, group: WorkerGroup, method: Any, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        if group is self.trainers:
            self.turns.of_ranks()
        whole, totals = with_counts(batch, algorithm)
        reports: list[UpdateReport] = group.call(method, whole, algorithm, totals).result()
        return reports[0]._replace(
            loss=sum(report.loss for report in reports), metrics=merge_metrics(*(report.metrics for report in reports))
        )


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
