"""Test a run's cluster with the real model: ranks, sampling, an update and a sync, with their bytes and seconds."""

import time
from collections.abc import Iterator
from contextlib import closing
from statistics import median
from typing import Any

import torch

from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.doctor.installation import Diagnosis
from rlprims.execution import ExecutionError
from rlprims.plan.sizes import engine_width, shape_of, text_of
from rlprims.trainer.config import Config
from rlprims.trainer.session import Parts, build
from rlprims.trainer.sources.responses import prompt_rows

_ALL_REDUCE = 64 << 20  # bytes that the ranks sum
_PAIRS = 5  # timings beside vLLM's own ``generate``, because one says little on a busy machine
_SLOW = 0.8  # the median share of its tokens per second below which sampling is called slow


def try_cluster(config: Config, console: Any) -> Iterator[Diagnosis]:
    """Start the processes of a run with this config, use each part once, and yield the findings. Nothing is saved.

    The test samples responses to the first batch of prompts. Then it updates the weights with advantages of +1 and -1
    and sends them to the engines. If the sync failed, the log-probs of the engines differ from those of the ranks.
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
        count, seconds = config.ray.training_workers, time.perf_counter() - begun
        found = f"{count} rank{'s' * (count > 1)} and engines ({config.ray.engine}) in {seconds:.1f} s"
        yield Diagnosis("start", True, found, "")
        for check in (_ranks, _steps):
            try:
                yield from check(config, parts)
            except ExecutionError as error:
                yield Diagnosis(check.__name__.strip("_"), False, str(error), "see docs/execution.md")
                return


def _ranks(config: Config, parts: Parts) -> Iterator[Diagnosis]:
    ranks = config.ray.training_workers
    if ranks == 1:
        yield Diagnosis("sum over ranks", True, "one rank: nothing to send", "")
        return
    backend, seconds, is_right = parts.execution.time_all_reduce(_ALL_REDUCE)  # type: ignore[attr-defined]
    rate = 2 * (ranks - 1) / ranks * _ALL_REDUCE / seconds
    found = f"{text_of(_ALL_REDUCE)} in {1e3 * seconds:.0f} ms, {text_of(rate)}/s in each direction ({backend})"
    yield Diagnosis(f"sum over {ranks} ranks", is_right, found, "the sum is wrong: try another network interface")


def _steps(config: Config, parts: Parts) -> Iterator[Diagnosis]:
    execution: Any = parts.execution
    examples = parts.training.rows[: config.prompts_per_step]
    rows = prompt_rows(examples, range(len(examples)), copies=config.algorithm.group_size, first_sample=0)
    width = max(len(ids) for ids in rows["prompt_ids"])

    def sample(first: int) -> tuple[DataProto, float]:
        rows["sample_id"] = torch.arange(first, first + len(rows))
        begun = time.perf_counter()
        batch: DataProto = execution.generate(rows, config.sampling, seed=config.seed, prompt_width=width)
        return batch, time.perf_counter() - begun

    def agreement(batch: DataProto, when: str) -> Diagnosis:
        difference = (execution.log_probs(batch) - batch["rollout_log_probs"])[batch["response_mask"]].abs()
        found = f"{difference.max():.1e} nats apart at most, {difference.mean():.1e} on average"
        is_right = bool(difference.mean() <= execution.tolerance)
        return Diagnosis(f"log-probs of engines and ranks {when}", is_right, found, "one of them has other weights")

    sample(0)  # not timed: during the first batch engines compile or capture graphs
    tokens, total, shares = 0, 0.0, list[float]()
    for pair in range(1, 1 + _PAIRS):
        batch, seconds = sample(pair * len(rows))
        tokens, total = tokens + int(batch["response_mask"].sum()), total + seconds
        if (bare := execution.time_plain_sampling(batch)) is not None:
            shares.append(bare / seconds)
    found = f"{_PAIRS * len(batch)} responses, {tokens} tokens in {total:.2f} s, {tokens / total:.0f} tokens/s"
    if shares:
        found += f", {median(shares):.2f} of the bare engine's on the same prompts and lengths (median of {_PAIRS})"
        if median(shares) < _SLOW:
            found += "; slow: profile: {} in the config of a run shows where the time goes"
    yield Diagnosis("sampling", True, found, "")
    yield agreement(batch, "at the start")

    execution.reports()
    begun = time.perf_counter()
    report = execution.update(ready(batch), algorithms.reinforce())
    seconds = time.perf_counter() - begun
    read = int(batch["attention_mask"].sum())
    memory = max((report.peak_memory for report in execution.reports() if "update" in report.work), default=0)
    found = f"{read} tokens in {seconds:.2f} s, {read / seconds:.0f} tokens/s; a rank's peak {text_of(memory)}"
    yield Diagnosis("update", not report.skipped, found, "the gradient is not finite: model.dtype: float32 says more")

    begun = time.perf_counter()
    execution.sync_weights()
    seconds, shape = time.perf_counter() - begun, shape_of(config.model)
    size = shape.parameters * engine_width(config) if config.model.engine_lora is None else 4 * shape.trained
    found = f"{text_of(size)} to each engine in {seconds:.2f} s, {text_of(size / seconds)}/s"
    yield Diagnosis("sync of weights", True, f"{found} ({execution.rollouts.delivery.name}); all tensors compared", "")
    yield agreement(sample((1 + _PAIRS) * len(rows))[0], "after it")


def ready(batch: DataProto) -> DataProto:
    """The batch with what the policy's loss reads: advantages of +1 and -1."""
    sign = 1.0 - 2.0 * (torch.arange(len(batch)) % 2)
    advantages = torch.where(batch["response_mask"], sign[:, None], 0.0)
    columns = {"advantages": advantages, "old_log_probs": batch["rollout_log_probs"]}
    return batch.union(DataProto.from_dict(tensors=columns))
