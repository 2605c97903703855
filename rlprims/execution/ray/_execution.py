"""The ``Execution`` on a Ray cluster: FSDP2 ranks train, vLLM engines sample."""

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor
from transformers import GenerationConfig

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution import (
    Finish,
    ModelConfig,
    OptimizerConfig,
    Profile,
    ProfileConfig,
    RayConfig,
    RunNeeds,
    Sampling,
    UpdateReport,
    WorkerReport,
)
from rlprims.execution._protocol import load_version, save_version
from rlprims.execution.hf import StepTotals, special_ids, with_counts, with_critic_counts
from rlprims.execution.hf._models import shards_of
from rlprims.execution.hf._routes import without_routes
from rlprims.execution.ray._calls import WorkerLost, fetch
from rlprims.execution.ray._checks import check, with_whole_paths
from rlprims.execution.ray._cluster import connect
from rlprims.execution.ray._head import HEAD, start
from rlprims.execution.ray._rollouts import DeviceSharing
from rlprims.execution.ray._start import start_workers
from rlprims.execution.ray._stream import RayStream, generate
from rlprims.execution.ray._training_worker import TrainingWorker
from rlprims.execution.ray._worker_group import WorkerGroup
from rlprims.types import merge_metrics

log = logging.getLogger(__name__)
R = TypeVar("R")

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}
"""The largest allowed difference, in nats, between the engine's and the trainer's log-probs of the probe tokens."""


class RayExecution:
    """Implements :class:`rlprims.execution.Execution` and :class:`rlprims.execution.Observable` on a Ray cluster.

    Training ranks hold the policy, its reference and its critic, in one pool or several. Each rollout worker holds an
    engine. The driver sends rows of a batch to the workers. The ranks send weights to the engines.
    """

    def __init__(
        self,
        cluster: RayConfig,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        tokenizer: Any,
        say: Callable[[str], None] = lambda progress: None,
        **run: Unpack[RunNeeds],
    ) -> None:
        begun = time.monotonic()
        model = with_whole_paths(model)
        check(cluster, model, run)
        self.tokenizer = tokenizer
        self.pad_token_id, _ = special_ids(GenerationConfig.from_pretrained(model.path), tokenizer)
        self.tolerance = _TOLERANCE[cluster.mixed_precision or model.dtype]
        self.weights_version = 0
        self.roles = cluster.roles
        self.overlaps = not cluster.colocate
        cpus = sum(pool.workers * pool.cpus for pool in cluster.all_pools.values())
        connect(cluster.address, cpus=cpus, timeout=cluster.start_timeout, say=say)

        def begin() -> ExitStack:
            with ExitStack() as held:
                try:
                    self._start(cluster, model, optimizer, run, held, say)
                except BaseException:  # the resources of the earlier steps are released, newest first
                    _release(held)
                    raise
                return held.pop_all()

        self._release = weakref.finalize(self, _release, start(begin, cluster.start_timeout, begun))
        if cluster.address or os.environ.get("RAY_ADDRESS"):
            HEAD.restarts()
        self._release.atexit = False  # at exit Ray ends its processes itself
        say(f"ray: ready after {time.monotonic() - begun:.0f} s")

    def _start(
        self,
        cluster: RayConfig,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        run: RunNeeds,
        held: ExitStack,
        say: Callable[[str], None],
    ) -> None:
        workers = start_workers(cluster, model, optimizer, run, held, tokenizer=self.tokenizer, say=say)
        self.pools, self.teachers, self.rollouts, self.context_window = workers
        self.trainers = self.pools["main"]
        self.sharing = DeviceSharing(self.trainers, self.rollouts, cluster.sleep_level if cluster.colocate else None)
        if cluster.colocate and not self.rollouts.frees_memory:
            log.warning("ray.colocate: on this platform engines free no memory when they sleep")
        self.sync_weights()

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None) -> DataProto:
        self.sharing.give_to_engines()
        return generate(self.rollouts, prompts, sampling, seed=seed, prompt_width=prompt_width)

    def stream(
        self, sampling: Sampling, *, seed: int, prompt_width: int | None, over_updates: bool = False
    ) -> RayStream:
        self.sharing.give_to_engines()
        return RayStream(self.rollouts, sampling, seed=seed, prompt_width=prompt_width, over_updates=over_updates)

    def log_probs(self, batch: DataProto, *, reference: bool = False) -> Tensor:
        group = self.pools[self.roles.reference] if reference else self.trainers
        rows = without_routes(batch) if reference else batch
        return self._measured(group, TrainingWorker.log_probs, rows, reference=reference)

    def teacher_log_probs(self, batch: DataProto) -> Tensor:
        return self._measured(self.teachers, TrainingWorker.teacher_log_probs, without_routes(batch))

    def top_tokens(self, batch: DataProto, size: int) -> Tensor:
        return self._measured(self.trainers, TrainingWorker.top_tokens, batch, size=size)

    def teacher_top(self, batch: DataProto, size: int) -> DataProto:
        return self._measured(self.teachers, TrainingWorker.teacher_top, without_routes(batch), size=size)

    def entropies(self, batch: DataProto) -> Tensor:
        return self._measured(self.trainers, TrainingWorker.entropies, batch)

    def values(self, batch: DataProto) -> Tensor:
        return self._measured(self.pools[self.roles.critic], TrainingWorker.values, batch)

    def reward_scores(self, batch: DataProto) -> Tensor:
        return self._measured(self.pools[self.roles.reward], TrainingWorker.reward_scores, without_routes(batch))

    def update(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        return self._learned(self.trainers, TrainingWorker.update, *with_counts(batch, algorithm), algorithm)

    def update_critic(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        counted = with_critic_counts(without_routes(batch), algorithm)
        return self._learned(self.pools[self.roles.critic], TrainingWorker.update_critic, *counted, algorithm)

    def sync_weights(self) -> None:
        """Send the newest weights to every engine, and check that they have arrived."""
        self.sharing.give_to_ranks()
        self.rollouts.delivery.take()
        probe = _probe(self.context_window, len(self.tokenizer))
        expected = self.trainers.call(TrainingWorker.probe, _probe_batch(probe)).result()[0][0]
        self.weights_version += 1
        self.sharing.give_to_engines(resend=False)
        self.rollouts.sync(self.weights_version, probe, partial(_compare, expected, self.tolerance))

    def save(self, directory: Path) -> Finish:
        self.sharing.give_to_ranks()
        groups = list(self.pools.values())
        for group in groups:
            group.call(TrainingWorker.save, directory.resolve()).result()
        self.tokenizer.save_pretrained(shards_of(directory / "policy"))
        save_version(directory, self.weights_version)
        return partial(_finish, groups)

    def load(self, directory: Path) -> None:
        self.sharing.give_to_ranks()
        for group in self.pools.values():
            group.call(TrainingWorker.load, directory.resolve()).result()
        self.weights_version = load_version(directory) - 1
        self.sync_weights()

    def time_all_reduce(self, size: int) -> tuple[str, float, bool]:
        """Time an all-reduce of ``size`` bytes: the backend, the slowest rank's seconds, and whether it is right."""
        self.sharing.give_to_ranks()
        backends, seconds, right = zip(*self.trainers.call(TrainingWorker.time_all_reduce, size).result(), strict=True)
        return backends[0], max(seconds), all(right)

    def time_plain_sampling(self, batch: DataProto, sampling: Sampling | None = None) -> float | None:
        """Time the engine's own ``generate`` on the prompts of a batch, with responses of the same lengths.

        Returns seconds, or None for the engine ``hf``. With ``sampling`` the requests have seeds and ask for log-probs,
        as those of :meth:`generate` do.
        """
        self.sharing.give_to_engines()
        return self.rollouts.time_plain_sampling(batch, sampling)

    def reports(self) -> list[WorkerReport]:
        return list(self._ask_all("report").values())

    def start_profile(self, config: ProfileConfig) -> None:
        self._ask_all("start_profile", config)

    def stop_profile(self) -> dict[str, Profile]:
        return {name: profile for name, profile in self._ask_all("stop_profile").items() if profile is not None}

    def _ask_all(self, method: str, *args: Any) -> dict[str, Any]:
        """Call a method of all workers; returns their answers by name, without those of lost workers.

        The next call that needs a lost worker raises an error.
        """
        groups = {group.name: group for group in (*self.pools.values(), self.teachers)} | {"rollout": self.rollouts}
        workers = {f"{name}_{i}": w for name, group in groups.items() for i, w in enumerate(group.workers)}
        asked = {name: getattr(worker, method).remote(name, *args) for name, worker in workers.items()}
        answers = {}
        for name, ref in asked.items():
            with suppress(WorkerLost):
                answers[name] = fetch(ref, name, self.trainers.timeout)
        return answers

    def close(self) -> None:
        self._release()

    def _measured(self, group: WorkerGroup, method: Callable[..., R], batch: DataProto, **options: Any) -> R:
        if group is self.trainers:
            self.sharing.give_to_ranks()
        measured: R = group.call(method, batch, **options).result()
        return measured

    def _learned(
        self, group: WorkerGroup, method: Any, batch: DataProto, totals: StepTotals, algorithm: Algorithm
    ) -> UpdateReport:
        if group is self.trainers:
            self.sharing.give_to_ranks()
        together = algorithm.together or "trajectory_ids"
        reports: list[UpdateReport] = group.call(method, batch, algorithm, totals, together=together).result()
        return reports[0]._replace(
            loss=sum(report.loss for report in reports), metrics=merge_metrics(*(report.metrics for report in reports))
        )


def _release(held: ExitStack) -> None:
    """Stop the workers and remove the placement groups. Without a head this is not possible: its end ends them."""
    if HEAD.lost:
        held.pop_all()
    else:
        held.close()


def _finish(groups: Sequence[WorkerGroup]) -> dict[str, str]:
    """Wait until all ranks have written a checkpoint; returns the SHA-256 of their files.

    The function polls, so that the ranks can run other calls between two polls.
    """
    hashes, pause = dict[str, str](), 0.01
    for group in groups:
        while None in (answers := group.call(TrainingWorker.saved).result()):
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        for answer in answers:
            hashes |= answer
    return hashes


def _probe(context_window: int, vocabulary: int) -> list[int]:
    """Return up to sixteen tokens, spread over the vocabulary, for the comparison of engines and ranks."""
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
    """Compare an engine's log-probs of the probe with the trainer's; returns an error as text, or None."""
    apart = float((torch.tensor(scores) - expected).abs().max())
    return None if apart <= tolerance else f"log-probs of the probe are {apart:.3g} nats from the trainer's"
