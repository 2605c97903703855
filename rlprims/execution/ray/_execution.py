"""The ``Execution`` on a Ray cluster: FSDP2 ranks train, vLLM engines sample."""

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution._config import (
    ModelConfig,
    OptimizerConfig,
    ProfileConfig,
    RayConfig,
    Sampling,
    backend_of,
    check_teacher_engine,
)
from rlprims.execution._meter import WorkerReport
from rlprims.execution._profile import Profile
from rlprims.execution._protocol import Finish, UpdateReport, load_version, save_version
from rlprims.execution.hf import special_ids, with_counts
from rlprims.execution.hf._models import device_of, shards_of
from rlprims.execution.hf._routes import routed_layers, without_routes
from rlprims.execution.ray._cluster import connect, with_whole_paths
from rlprims.execution.ray._delivery import Adapters, Delivery, Wire
from rlprims.execution.ray._engine_options import check_engine_options
from rlprims.execution.ray._head import HEAD, start
from rlprims.execution.ray._pools import reserve_pools, start_teacher, start_training
from rlprims.execution.ray._rollout_worker import RolloutWorker
from rlprims.execution.ray._rollouts import Rollouts
from rlprims.execution.ray._stream import RayStream, generate
from rlprims.execution.ray._tensor_parallel import check_plans
from rlprims.execution.ray._training_worker import TrainingWorker
from rlprims.execution.ray._turns import Turns
from rlprims.execution.ray._worker_group import WorkerGroup, WorkerLost, fetch, start_worker
from rlprims.types import merge_metrics

log = logging.getLogger(__name__)

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
        algorithm: Algorithm,
        tokenizer: Any,
        temperature: float,
        updates: int,
        critic_optimizer: OptimizerConfig | None = None,
        critic_updates: int | None = None,
        say: Callable[[str], None] = lambda progress: None,
    ) -> None:
        begun = time.monotonic()
        model = with_whole_paths(model)
        check_plans(cluster, model, algorithm)
        check_engine_options(cluster, model)
        if algorithm.needs_teacher:
            check_teacher_engine(cluster, model, temperature=temperature)
        if model.replay_routes:
            _check_routes(cluster, model)
        self.tokenizer = tokenizer
        self.pad_token_id, _ = special_ids(GenerationConfig.from_pretrained(model.path), tokenizer)
        self.tolerance = _TOLERANCE[cluster.mixed_precision or model.dtype]
        self.weights_version = 0
        self.roles = cluster.roles
        self.overlaps = not cluster.colocate
        cpus = sum(pool.workers * pool.cpus for pool in cluster.all_pools.values())
        connect(cluster.address, cpus=cpus, timeout=cluster.start_timeout, say=say)
        options = {
            "algorithm": algorithm,
            "temperature": temperature,
            "updates": updates,
            "critic_optimizer": critic_optimizer,
            "critic_updates": critic_updates,
        }

        def begin() -> ExitStack:
            with ExitStack() as held:
                try:
                    self._start(cluster, model, optimizer, options, held, say)
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
        options: dict[str, Any],
        held: ExitStack,
        say: Callable[[str], None],
    ) -> None:
        backend = backend_of(cluster, device_of(model).type)
        places = reserve_pools(cluster, model, held)
        engines = cluster.roles.rollout
        count = cluster.rollout_workers if engines == "main" else cluster.pools[engines].workers
        say(f"ray: loading the models in {cluster.training_workers} ranks and {count} engines ({cluster.engine})")
        before = cluster.training_workers if engines == "main" and not cluster.colocate else 0

        def process(rank: int) -> Any:
            return start_worker(RolloutWorker, before + rank, before + count, **places[engines])

        # All processes start at the same time, because their imports take seconds. The ranks load their models first,
        # because an engine reserves the memory that is free.
        begun = [process(rank) for rank in reversed(range(count))]
        scoring = None
        if cluster.teacher_engine == "vllm":  # it loads while the ranks load
            scoring = start_teacher(cluster, model, options["algorithm"], places, held)
        groups, window = start_training(cluster, model, optimizer, options, places, held)
        self.pools, self.trainers, self.context_window = groups, groups["main"], window
        if scoring is not None:
            scoring.result(cluster.start_timeout)
        self.teachers = scoring.group if scoring is not None else groups[cluster.roles.teacher]
        if cluster.colocate:
            self.trainers.call(TrainingWorker.offload).result()
        tokenizer = self.tokenizer  # a reference to self in an exit callback would keep this object alive forever

        def start(rank: int) -> tuple[Any, Any]:
            worker = begun.pop() if begun else process(rank)
            return worker, worker.build.remote(cluster, model, tokenizer, window, backend)

        # Send the weights in the dtype of the engine: vLLM uses mixed_precision, the engine ``hf`` always model.dtype.
        dtype = (cluster.mixed_precision if cluster.engine == "vllm" else None) or model.dtype
        alone = model.engine_lora is not None
        delivery: Delivery = (
            Adapters(self.trainers) if alone else Wire(self.trainers, cluster.tensor_parallel_size, dtype, backend)
        )
        self.rollouts = Rollouts(
            start,
            count,
            timeout=cluster.call_timeout,
            start_timeout=cluster.start_timeout,
            max_replacements=cluster.max_replacements,
            max_rows=model.max_rows_per_generation,
            delivery=delivery,
        )
        held.callback(self.rollouts.stop)
        self.turns = Turns(self.trainers, self.rollouts, cluster.sleep_level if cluster.colocate else None)
        if cluster.colocate and not self.rollouts.frees_memory:
            log.warning("ray.colocate: on this platform engines free no memory when they sleep")
        self.sync_weights()

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None) -> DataProto:
        self.turns.of_engines()
        return generate(self.rollouts, prompts, sampling, seed=seed, prompt_width=prompt_width)

    def stream(
        self, sampling: Sampling, *, seed: int, prompt_width: int | None, over_updates: bool = False
    ) -> RayStream:
        self.turns.of_engines()
        return RayStream(self.rollouts, sampling, seed=seed, prompt_width=prompt_width, over_updates=over_updates)

    def log_probs(self, batch: DataProto, *, reference: bool = False) -> Tensor:
        group = self.pools[self.roles.reference] if reference else self.trainers
        rows = without_routes(batch) if reference else batch
        return self._measured(group, TrainingWorker.log_probs, rows, reference=reference)

    def teacher_log_probs(self, batch: DataProto) -> Tensor:
        return self._measured(self.teachers, self.teachers.worker.teacher_log_probs, without_routes(batch))

    def top_tokens(self, batch: DataProto, size: int) -> Tensor:
        return self._measured(self.trainers, TrainingWorker.top_tokens, batch, size=size)

    def teacher_top(self, batch: DataProto, size: int) -> DataProto:
        group = self.teachers
        if group is self.trainers:
            self.turns.of_ranks()
        top: DataProto = group.call(group.worker.teacher_top, without_routes(batch), size=size).result()
        return top

    def entropies(self, batch: DataProto) -> Tensor:
        return self._measured(self.trainers, TrainingWorker.entropies, batch)

    def values(self, batch: DataProto) -> Tensor:
        return self._measured(self.pools[self.roles.critic], TrainingWorker.values, batch)

    def reward_scores(self, batch: DataProto) -> Tensor:
        return self._measured(self.pools[self.roles.reward], TrainingWorker.reward_scores, without_routes(batch))

    def update(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        return self._learned(self.trainers, TrainingWorker.update, batch, algorithm)

    def update_critic(self, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        rows = without_routes(batch)
        return self._learned(self.pools[self.roles.critic], TrainingWorker.update_critic, rows, algorithm)

    def sync_weights(self) -> None:
        """Send the newest weights to every engine, and check that they have arrived."""
        self.turns.of_ranks()
        self.rollouts.delivery.take()
        probe = _probe(self.context_window, len(self.tokenizer))
        expected = self.trainers.call(TrainingWorker.probe, _probe_batch(probe)).result()[0][0]
        self.weights_version += 1
        self.turns.of_engines(resend=False)
        self.rollouts.sync(self.weights_version, probe, partial(_compare, expected, self.tolerance))

    def save(self, directory: Path) -> Finish:
        self.turns.of_ranks()
        groups = list(self.pools.values())
        for group in groups:
            group.call(TrainingWorker.save, directory.resolve()).result()
        self.tokenizer.save_pretrained(shards_of(directory / "policy"))
        save_version(directory, self.weights_version)
        return partial(_finish, groups)

    def load(self, directory: Path) -> None:
        self.turns.of_ranks()
        for group in self.pools.values():
            group.call(TrainingWorker.load, directory.resolve()).result()
        self.weights_version = load_version(directory) - 1
        self.sync_weights()

    def time_all_reduce(self, size: int) -> tuple[str, float, bool]:
        """Time an all-reduce of ``size`` bytes: the backend, the slowest rank's seconds, and whether it is right."""
        self.turns.of_ranks()
        backends, seconds, right = zip(*self.trainers.call(TrainingWorker.time_all_reduce, size).result(), strict=True)
        return backends[0], max(seconds), all(right)

    def time_plain_sampling(self, batch: DataProto, sampling: Sampling | None = None) -> float | None:
        """Time the engine's own ``generate`` on the prompts of a batch, with responses of the same lengths.

        Returns seconds, or None for the engine ``hf``. With ``sampling`` the requests have seeds and ask for log-probs,
        as those of :meth:`generate` do.
        """
        self.turns.of_engines()
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

    def _measured(self, group: WorkerGroup, method: Any, batch: DataProto, **options: Any) -> Tensor:
        if group is self.trainers:
            self.turns.of_ranks()
        measured: Tensor = group.call(method, batch, **options).result()
        return measured

    def _learned(self, group: WorkerGroup, method: Any, batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        if group is self.trainers:
            self.turns.of_ranks()
        whole, totals = with_counts(batch, algorithm)
        together = algorithm.together or "trajectory_ids"
        reports: list[UpdateReport] = group.call(method, whole, algorithm, totals, together=together).result()
        return reports[0]._replace(
            loss=sum(report.loss for report in reports), metrics=merge_metrics(*(report.metrics for report in reports))
        )


def _check_routes(cluster: RayConfig, model: ModelConfig) -> None:
    """Raise an error if experts cannot be recorded: by a model without experts, or by vLLM without a GPU."""
    routed_layers(model.path)
    gpus = cluster.all_pools[cluster.roles.rollout].gpus
    if cluster.engine == "vllm" and not gpus and device_of(model).type == "cpu":
        raise ValueError(
            "model.replay_routes: expected engines with a GPU (ray.gpus_per_worker, or pools with gpus), because only "
            "vLLM's model runner V2 records experts, got engines on a CPU; use ray.engine: hf, or set "
            "model.replay_routes: false"
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
