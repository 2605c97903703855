"""The metrics of a step: of its batch, its updates, its workers and its stages."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rlprims import diagnostics
from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.execution import UpdateReport, WorkerReport
from rlprims.grouping import dense_ids
from rlprims.trajectories import join
from rlprims.types import Metrics, merge_metrics


def summarize(reports: list[UpdateReport]) -> dict[str, float]:
    """The metrics of a step's updates: loss, gradient norm and the others as means, the last learning rate."""
    if not reports:
        return {}
    merged = merge_metrics(*(report.metrics for report in reports))
    means = {
        "loss": float(np.mean([report.loss for report in reports])),
        "grad_norm": float(np.mean([report.grad_norm for report in reports])),
        "lr": reports[-1].lr,
    }
    return means | {name: float(metric.value()) for name, metric in merged.items()}


def _responses(batch: DataProto) -> Metrics:
    """Metrics of scores and lengths. Rows without a score are ignored; an episode counts once, with all its tokens."""
    scored = batch["scores"].isfinite()
    scores, mask = batch["scores"][scored], batch["response_mask"][scored]
    if "trajectory_ids" not in batch:
        return diagnostics.responses(scores, mask)
    joined = join(dense_ids(batch["trajectory_ids"][scored]), mask)
    count = int(joined.exists.sum())
    cu_seqlens = joined.cu_seqlens[: count + 1]
    return diagnostics.responses(joined.rows(scores)[:count], joined.tokens(mask), cu_seqlens)


def batch_metrics(batch: DataProto, *, weights_version: int) -> dict[str, float]:
    """The metrics of a training batch before its updates; ``weights_version`` is that of the sampler's weights."""
    mask = batch["response_mask"]
    metrics = _responses(batch)
    metrics["trained_score"] = metrics.pop("score")
    metrics["truncated"] = diagnostics.share(batch["ended"] == Ended.LENGTH)
    for code in set(batch["ended"].tolist()) - {Ended.STOP, Ended.LENGTH}:
        metrics[f"ended/{Ended(code).label}"] = diagnostics.share(batch["ended"] == code)
    metrics["advantage_abs"] = diagnostics.token_mean(batch["advantages"].abs(), mask)
    if "old_log_probs" in batch:
        metrics |= diagnostics.sampler_mismatch(batch["old_log_probs"], batch["rollout_log_probs"], mask)
        metrics |= _largest_mismatch(batch)
    if "teacher_log_probs" in batch:  # an estimate of KL(student || teacher), before the update
        gap = batch["rollout_log_probs"] - batch["teacher_log_probs"]
        metrics["teacher_kl"] = diagnostics.token_mean(gap, mask)
    if "teacher_mask" in batch:
        metrics["teacher_rows"] = diagnostics.share(batch["teacher_mask"].any(-1))
    if "returns" in batch:
        metrics["explained_variance"] = diagnostics.explained_variance(batch["values"], batch["returns"], mask)
    age = weights_version - batch["weights_version"]
    described = {name: float(metric.value()) for name, metric in metrics.items()}
    return described | {"staleness": float(age.float().mean()), "staleness_max": float(age.max())}


def _largest_mismatch(batch: DataProto) -> Metrics:
    """The largest mismatch in rows of the newest weights, and, separately, in rows of older weights.

    The first one is an error of sampler or trainer; the second one also has the effect of the updates in between.
    """
    columns, versions = (batch["old_log_probs"], batch["rollout_log_probs"]), batch["weights_version"]
    older = (versions < versions.max())[:, None] & batch["response_mask"]
    newest = diagnostics.sampler_mismatch(*columns, batch["response_mask"] & ~older)["mismatch_max"]
    if not older.any():
        return {"mismatch_max": newest}
    return {
        "mismatch_max": newest,
        "mismatch_max_stale": diagnostics.sampler_mismatch(*columns, older)["mismatch_max"],
    }


def worker_metrics(reports: list[WorkerReport]) -> dict[str, float]:
    """Tokens per second of each worker and verb, its memory, and the share of the devices' peak FLOP/s in updates."""
    metrics, flops_done, flops_possible = dict[str, float](), 0.0, 0.0
    for worker, work, peak_flops, peak_memory in reports:
        metrics[f"memory/{worker}"] = peak_memory / 2**30
        for verb, (seconds, tokens, flops) in work.items():
            if tokens:
                metrics[f"time/tokens_per_second/{worker}/{verb}"] = tokens / max(seconds, 1e-9)
            flops_done += flops
            flops_possible += seconds * peak_flops if flops else 0.0
    return metrics | ({"time/mfu": flops_done / flops_possible} if flops_possible else {})


class Clock:
    """The seconds of each stage. A profile shows the stages by name."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.stages: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        begun = time.monotonic()
        with torch.profiler.record_function(stage):
            yield
        self.stages[stage] = self.stages.get(stage, 0.0) + time.monotonic() - begun

    def seconds(self) -> dict[str, float]:
        return {f"time/{stage}": seconds for stage, seconds in self.stages.items()}

    def metrics(self, tokens: int) -> dict[str, float]:
        total = time.monotonic() - self.start
        return {**self.seconds(), "time/step": total, "time/tokens_per_second": tokens / max(total, 1e-9)}
