"""The best evaluation so far. Its checkpoint is kept, and a run can end early because of it."""

import json
from collections.abc import Mapping
from pathlib import Path


class Best:
    """The largest value of a metric, and the number of evaluations since then; without a metric it does nothing."""

    def __init__(self, metric: str | None, file: Path, *, stop_at: float | None, patience: int | None) -> None:
        self.metric, self.file, self.stop_at, self.patience = metric, file, stop_at, patience
        self.value = float("-inf")
        self.step: int | None = None
        self.evaluations_since = 0

    def record(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record an evaluation; returns whether it is the best. Step 0 never is: it has no checkpoint."""
        if self.metric is None:
            return False
        if self.metric not in metrics:
            raise ValueError(f"evaluation.best is {self.metric!r}; an evaluation has {sorted(metrics)}")
        if step == 0 or step == self.step:
            return False
        better = metrics[self.metric] > self.value
        if better:
            self.value, self.step, self.evaluations_since = metrics[self.metric], step, 0
            self.file.write_text(json.dumps({"metric": self.metric, "value": self.value, "step": step}) + "\n")
        else:
            self.evaluations_since += 1
        return better

    @property
    def should_stop(self) -> bool:
        """Whether ``stop_at`` is reached, or the last ``patience`` evaluations were not better."""
        return self._reached or (self.patience is not None and self.evaluations_since >= self.patience)

    @property
    def stop_reason(self) -> str:
        reason = "as asked" if self._reached else f"{self.evaluations_since} evaluations without a larger one"
        return f"{self.metric} is {self.value:.4g} at step {self.step}, {reason}"

    @property
    def _reached(self) -> bool:
        return self.stop_at is not None and self.value >= self.stop_at

    def truncate_after(self, step: int) -> None:
        """Go back to the best evaluation up to that step, for a run that continues from a checkpoint."""
        if self.file.exists() and (found := json.loads(self.file.read_text()))["step"] <= step:
            self.value, self.step = found["value"], found["step"]
        else:
            self.file.unlink(missing_ok=True)
