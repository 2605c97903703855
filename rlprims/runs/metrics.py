"""The metrics of a step: of its batch, its updates, its workers and its stages."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rlprims.execution import UpdateReport, WorkerReport
from rlprims.types import merge_metrics


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
