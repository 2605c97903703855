"""What a step measured: its updates as means, its stages in seconds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rlprims import diagnostics
from rlprims.data_proto import DataProto
from rlprims.execution import UpdateReport, WorkerReport
from rlprims.grouping import dense_ids
from rlprims.trajectories import join
from rlprims.types import Metrics, merge_metrics


def summarize(reports: list[UpdateReport]) -> dict[str, float]:
    """Means over the updates of a step; the parts' sums where they are sums."""
    if not reports:
        return {}
    merged = merge_metrics(*(report.metrics for report in reports))
    means = {
        "loss": float(np.mean([report.loss for report in reports])),
        "grad_norm": float(np.mean([report.grad_norm for report in reports])),
        "lr": reports[-1].lr,
    }
    return means | {name: float(metric.value()) for name, metric in merged.items()}


def responses(batch: DataProto) -> Metrics:
    """Scores and lengths of those that have a score; an episode of several rows counts once, with all its tokens."""
    scored = batch["scores"].isfinite()
    scores, mask = batch["scores"][scored], batch["response_mask"][scored]
    if "trajectory_ids" not in batch:
        return diagnostics.responses(scores, mask)
    joined = join(dense_ids(batch["trajectory_ids"][scored]), mask)
    count = int(joined.exists.sum())
    cu_seqlens = joined.cu_seqlens[: count + 1]
    return diagnostics.responses(joined.rows(scores)[:count], joined.tokens(mask), cu_seqlens)


def largest_mismatch(batch: DataProto) -> Metrics:
    """Of the newest weights' rows, where it is a fault; of older rows, the surplus, it is the updates', too."""
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
    """Tokens per second of each worker and verb, its memory, and how much of the devices the updates made use of."""
    metrics, done, possible = dict[str, float](), 0.0, 0.0
    for worker, work, peak_flops, peak_memory in reports:
        metrics[f"memory/{worker}"] = peak_memory / 2**30
        for verb, (seconds, tokens, flops) in work.items():
            if tokens:
                metrics[f"time/tokens_per_second/{worker}/{verb}"] = tokens / max(seconds, 1e-9)
            done, possible = done + flops, possible + (seconds * peak_flops if flops else 0.0)
    return metrics | ({"time/mfu": done / possible} if possible else {})


class Clock:
    """Seconds by stage; a profile shows the stages by name."""

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
