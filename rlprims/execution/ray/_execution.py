"""The ``Execution`` on a Ray cluster: FSDP2 ranks train, vLLM engines sample."""

import logging
import os
import sys
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
from rlprims.execution._config import TOLERANCE
from rlprims.execution._protocol import Finish, load_version, save_version
from rlprims.execution.hf import StepTotals, special_ids, with_counts, with_critic_counts
from rlprims.execution.hf._models import shards_of
from rlprims.execution.hf._routes import without_routes
from rlprims.execution.ray._calls import WorkerLost, fetch
from rlprims.execution.ray._checks import check, with_whole_paths
from rlprims.execution.ray._cluster import Say, connect
from rlprims.execution.ray._head import HEAD, start
from rlprims.execution.ray._rollouts import DeviceSharing
from rlprims.execution.ray._start import start_workers
from rlprims.execution.ray._stream import RayStream, generate
from rlprims.execution.ray._training_worker import TrainingWorker
from rlprims.execution.ray._worker_group import WorkerGroup
from rlprims.types import merge_metrics

log = logging.getLogger(__name__)
R = TypeVar("R")

_PROBE = "One two three four five six seven eight nine ten. The cat sat on the mat, and the dog lay by the door."


class RayExecution:
    """:class:`rlprims.execution.Models` and :class:`rlprims.execution.Observable` on a Ray cluster.

    Ranks hold policy, reference and critic, in one pool or several; each rollout worker holds an engine. The driver
    sends rows to both, and the ranks send weights to the engines.
    """

    def __init__(
        self,
        cluster: RayConfig,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        tokenizer: Any,
        say: Say = lambda progress: None,
        **run: Unpack[RunNeeds],
    ) -> None:
        begun = time.monotonic()
        model = with_whole_paths(model)
        check(cluster, model.here(weights=False), run)  # each worker fetches the weights for itself
        if not run.get("images"):
            model = model.model_copy(update={"vision": "none"})
        self.tokenizer = tokenizer
        self.pad_token_id, _ = special_ids(GenerationConfig.from_pretrained(model.here(weights=False).path), tokenizer)
        self.tolerance = TOLERANCE[cluster.mixed_precision or model.dtype]
        self.longest_probe = min(32, model.max_tokens_per_micro_batch or 32)
        self.weights_version = 0
        self.roles = cluster.roles
        self.overlaps = not cluster.colocate
        cpus = sum(pool.workers * pool.cpus for pool in cluster.all_pools.values())
        how: Any = {"timeout": cluster.start_timeout, "say": say, "runtime_env": cluster.runtime_env or None}
        HEAD.session = connect(cluster.address, cpus=cpus, **cluster.init, **how) or HEAD.session
        HEAD.watch()
        begin = partial(self._start, cluster, model, optimizer, run, say)
        self._release = weakref.finalize(self, _release, start(begin, cluster.start_timeout, begun))
        if cluster.address or os.environ.get("RAY_ADDRESS"):
            HEAD.restarts()
        self._release.atexit = False  # at exit Ray ends its processes itself
        say(f"ray: ready after {time.monotonic() - begun:.0f} s")

    def _start(
        self, cluster: RayConfig, model: ModelConfig, optimizer: OptimizerConfig, run: RunNeeds, say: Say
    ) -> ExitStack:
        with ExitStack() as held:
            try:
                workers = start_workers(cluster, model, optimizer, run, held, tokenizer=self.tokenizer, say=say)
                self.pools, self.rollouts, self.context_window = workers
                self.trainers, self.teachers = self.pools["main"], self.pools[self.roles.teacher]
                level = cluster.sleep_level if cluster.colocate else None
                self.sharing = DeviceSharing(self.trainers, self.rollouts, level)
                if cluster.colocate and not self.rollouts.frees_memory:
                    log.warning("ray.colocate: on this platform engines free no memory when they sleep")
                self.sync_weights()
            except BaseException:  # the resources of the earlier steps are released, newest first
                _release(held)
                raise
            return held.pop_all()

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None) -> DataProto:
        self.sharing.give_to_engines()
        return generate(self.rollouts, prompts, sampling, seed=seed, prompt_width=prompt_width)

    def stream(
        self, sampling: Sampling, *, seed: int, prompt_width: int | None, over_updates: bool = False
    ) -> RayStream:
        self.sharing.give_to_engines()
        return RayStream(self.rollouts, sampling, seed=seed, prompt_width=prompt_width, over_updates=over_updates)

    def log_probs(self, batch: DataProto, *, reference: bool = False, plain: bool = False) -> Tensor:
        group = self.pools[self.roles.reference] if reference else self.trainers
        rows = without_routes(batch) if reference else batch
        return self._measured(group, TrainingWorker.log_probs, rows, reference=reference, plain=plain)

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
        probe = _probe(self.tokenizer)[: min(self.longest_probe, self.context_window - 1)]
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

        Seconds; None for ``hf`` and for images. With ``sampling`` requests have seeds and log-probs, as in a run.
        """
        self.sharing.give_to_engines()
        return self.rollouts.time_plain_sampling(batch, sampling)

    def reports(self) -> list[WorkerReport]:
        return list(self._ask_all("report", timeout=self.trainers.heartbeat).values())

    def start_profile(self, config: ProfileConfig) -> None:
        self._ask_all("start_profile", config)

    def stop_profile(self) -> dict[str, Profile]:
        return {name: profile for name, profile in self._ask_all("stop_profile").items() if profile is not None}

    def _ask_all(self, method: str, *args: Any, timeout: float | None = None) -> dict[str, Any]:
        """Call a method of all workers; returns their answers by name, without those of lost workers."""
        groups = {group.name: group for group in self.pools.values()} | {"rollout": self.rollouts}
        workers = {f"{name}_{i}": w for name, group in groups.items() for i, w in enumerate(group.workers)}
        asked = {name: getattr(worker, method).remote(name, *args) for name, worker in workers.items()}
        answers = {}
        for name, ref in asked.items():
            with suppress(WorkerLost):
                answers[name] = fetch(ref, name, timeout or self.trainers.timeout)
        return answers

    def close(self) -> None:
        self._release()
        HEAD.ended(failed=sys.exc_info()[0] is not None)

    def _measured(self, group: WorkerGroup, method: Callable[..., R], *args: Any, **options: Any) -> R:
        if group is self.trainers:
            self.sharing.give_to_ranks()
        measured: R = group.call(method, *args, **options).result()
        return measured

    def _learned(
        self, group: WorkerGroup, method: Any, batch: DataProto, totals: StepTotals, algorithm: Algorithm
    ) -> UpdateReport:
        together = algorithm.together or "trajectory_ids"
        reports: list[UpdateReport] = self._measured(group, method, batch, algorithm, totals, together=together)
        loss, metrics = sum(report.loss for report in reports), merge_metrics(*(report.metrics for report in reports))
        return reports[0]._replace(loss=loss, metrics=metrics)


def _release(held: ExitStack) -> None:
    """Stop the workers and remove the placement groups. Without a head this is not possible: its end ends them."""
    if HEAD.lost:
        held.pop_all()
    else:
        held.close()


def _finish(groups: Sequence[WorkerGroup]) -> dict[str, str]:
    """Poll until all ranks have written a checkpoint; returns the SHA-256 of their files. Other calls run meanwhile."""
    hashes, pause = dict[str, str](), 0.01
    for group in groups:
        while None in (answers := group.call(TrainingWorker.saved).result()):
            time.sleep(pause)
            pause = min(2 * pause, 1.0)
        for answer in answers:
            hashes |= answer
    return hashes


def _probe(tokenizer: Any) -> list[int]:
    """Ordinary text, whose log-probs differ least; if the tokenizer lacks its words, 16 tokens over the vocabulary."""
    text: list[int] = tokenizer.encode(_PROBE)
    usual = sorted({*range(len(tokenizer))} - {*tokenizer.all_special_ids})  # placeholders have -inf
    return text if len(set(text)) >= 8 else [usual[token * len(usual) // 16] for token in range(16)]


def _probe_batch(probe: Sequence[int]) -> DataProto:
    tokens = torch.tensor([probe])
    valid = torch.ones_like(tokens, dtype=torch.bool)
    masks = {"attention_mask": valid, "response_mask": valid[:, 1:]}
    return DataProto.from_dict(tensors={"prompts": tokens[:, :1], "responses": tokens[:, 1:], **masks})


def _compare(expected: Tensor, tolerance: float, scores: Sequence[float]) -> str | None:
    """Compare an engine's log-probs of the probe with the trainer's; returns an error as text, or None."""
    apart = float((torch.tensor(scores) - expected).abs().mean())
    return None if apart <= tolerance else f"log-probs of the probe are {apart:.3g} nats from the trainer's"
