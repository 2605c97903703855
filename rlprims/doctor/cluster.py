"""Test a run's cluster with the real model: ranks, sampling, an update and a sync, with their bytes and seconds."""

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.doctor.installation import Finding
from rlprims.execution import ExecutionError, WorkerReport
from rlprims.plan.memory import shape_of
from rlprims.trainer.config import Config
from rlprims.trainer.session import Parts, build
from rlprims.trainer.sources.responses import prompt_rows

_ALL_REDUCE = 64 << 20
"""The bytes that the ranks sum."""

_LEAST_SHARE_OF_BARE_ENGINE = 0.8
"""The least acceptable ratio of the tokens per second to those of vLLM's own ``generate``."""


def try_cluster(config: Config, console: Any) -> Iterator[Finding]:
    """Start the processes of a run with this config, use each part once, and yield the findings. Nothing is saved.

    The test samples responses to the first batch of prompts. Then it updates the weights with advantages of +1 and -1
    and sends them to the engines. If the sync failed, the log-probs of the engines differ from those of the ranks.

    Raises:
        ValueError: the config has ``execution: local`` or an environment, or the cluster does not start.
    """
    if config.execution != "ray":
        raise ValueError("doctor --cluster tries the cluster of a config with execution: ray: add execution=ray")
    if config.data.environment is not None:
        raise ValueError(
            "doctor --cluster samples prompts, and data.environment has none: use a file of prompts, "
            "data.environment=null data.train=FILE.jsonl"
        )
    config = config.model_copy(update={"replay": None})
    begun = time.perf_counter()
    parts = build(config, console)
    with closing(parts.execution):
        count = config.ray.training_workers
        found = f"{_count(count, 'rank')} and engines ({config.ray.engine}) in {time.perf_counter() - begun:.1f} s"
        yield Finding("start", True, found, "")
        for check in (_ranks, _steps):
            try:
                yield from check(config, parts)
            except ExecutionError as error:
                yield Finding(check.__name__.strip("_"), False, str(error), "see docs/execution.md")
                return


def _ranks(config: Config, parts: Parts) -> Iterator[Finding]:
    ranks = config.ray.training_workers
    if ranks == 1:
        yield Finding("sum over ranks", True, "one rank: nothing to send", "")
        return
    backend, seconds, is_right = parts.execution.time_all_reduce(_ALL_REDUCE)  # type: ignore[attr-defined]
    rate = 2 * (ranks - 1) / ranks * _ALL_REDUCE / seconds
    found = f"{_size(_ALL_REDUCE)} in {1e3 * seconds:.0f} ms, {_size(rate)}/s in each direction ({backend})"
    yield Finding(f"sum over {ranks} ranks", is_right, found, "the sum is wrong: try another network interface")


def _steps(config: Config, parts: Parts) -> Iterator[Finding]:
    execution: Any = parts.execution
    examples = parts.training.rows[: config.prompts_per_step]
    rows = prompt_rows(examples, range(len(examples)), copies=config.algorithm.group_size, first_sample=0)
    width = max(len(ids) for ids in rows["prompt_ids"])

    def sample(first: int) -> tuple[DataProto, float]:
        rows["sample_id"] = torch.arange(first, first + len(rows))
        begun = time.perf_counter()
        batch: DataProto = execution.generate(rows, config.sampling, seed=config.seed, prompt_width=width)
        return batch, time.perf_counter() - begun

    def agreement(batch: DataProto, when: str) -> Finding:
        difference = (execution.log_probs(batch) - batch["rollout_log_probs"])[batch["response_mask"]].abs()
        found = f"{_number(difference.max())} nats apart at most, {_number(difference.mean())} on average"
        is_right = bool(difference.mean() <= execution.tolerance)
        return Finding(f"log-probs of engines and ranks {when}", is_right, found, "one of them has other weights")

    sample(0)  # not timed: during the first batch engines compile or capture graphs
    batch, seconds = sample(len(rows))
    tokens = int(batch["response_mask"].sum())
    found = f"{len(batch)} responses, {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s"
    bare = execution.time_plain_sampling(batch)
    share = 1.0 if bare is None else bare / seconds
    comparison = "" if bare is None else f", {share:.2f} of the bare engine's on the same prompts and lengths"
    remedy = "profile: {} in the config shows where the time goes"
    yield Finding("sampling", share >= _LEAST_SHARE_OF_BARE_ENGINE, found + comparison, remedy)
    yield agreement(batch, "at the start")

    execution.reports()
    begun = time.perf_counter()
    report = execution.update(_with_advantages(batch), algorithms.reinforce())
    seconds = time.perf_counter() - begun
    read = int(batch["attention_mask"].sum())
    memory = max(_of_training(execution.reports()), default=0)
    found = f"{read} tokens in {seconds:.2f} s, {read / seconds:.0f} tokens/s; a rank's peak {_size(memory)}"
    yield Finding("update", not report.skipped, found, "the gradient is not finite: model.dtype: float32 says more")

    begun = time.perf_counter()
    execution.sync_weights()
    seconds, size = time.perf_counter() - begun, _bytes_of_a_sync(config)
    by = execution.rollouts.delivery.name
    found = f"{_size(size)} to each engine in {seconds:.2f} s, {_size(size / seconds)}/s ({by}); all tensors compared"
    yield Finding("sync of weights", True, found, "")
    yield agreement(sample(2 * len(rows))[0], "after it")


def _bytes_of_a_sync(config: Config) -> float:
    shape, is_whole = shape_of(config.model), config.model.engine_lora is None
    cast = config.ray.mixed_precision if config.ray.engine == "vllm" else None
    dtype = getattr(torch, cast or config.model.dtype) if is_whole else torch.float32
    return float((shape.parameters if is_whole else shape.trained) * dtype.itemsize)


def _with_advantages(batch: DataProto) -> DataProto:
    sign = 1.0 - 2.0 * (torch.arange(len(batch)) % 2)
    mask: Tensor = batch["response_mask"]
    columns = {"advantages": torch.where(mask, sign[:, None], 0.0), "old_log_probs": batch["rollout_log_probs"]}
    return batch.union(DataProto.from_dict(tensors=columns))


def _of_training(reports: list[WorkerReport]) -> list[int]:
    return [report.peak_memory for report in reports if "update" in report.work]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _number(x: Tensor) -> str:
    return f"{float(x):.1e}"


def _size(count: float) -> str:
    """Format a number of bytes in the largest unit in which it is at least 1."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
