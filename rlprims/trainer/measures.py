"""What a step measured: its updates as means, its stages in seconds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from rlprims.execution import UpdateReport
from rlprims.types import merge_metrics


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


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.stages: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.stages[stage] = self.stages.get(stage, 0.0) + time.monotonic() - begun

    def metrics(self, tokens: int) -> dict[str, float]:
        total = time.monotonic() - self.start
        stages = {f"time/{stage}": seconds for stage, seconds in self.stages.items()}
        return {**stages, "time/step": total, "time/tokens_per_second": tokens / max(total, 1e-9)}
