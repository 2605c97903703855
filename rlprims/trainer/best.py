"""The best evaluation so far: its checkpoint is kept, and it decides when a run ends early."""

import json
from collections.abc import Mapping
from pathlib import Path

from rlprims.trainer.config import EvaluationConfig


class Best:
    """The largest value of a metric, and how many evaluations there were since; kept in ``best.json`` of the run.

    Without a metric it does nothing.
    """

    def __init__(self, metric: str | None, file: Path, *, stop_at: float | None, patience: int | None) -> None:
        self.metric, self.file = metric, file
        self.stop_at, self.patience = stop_at, patience
        self.value = float("-inf")
        self.step: int | None = None
        self.since = 0

    @classmethod
    def of(cls, config: EvaluationConfig, run: Path) -> "Best":
        return cls(config.best, run / "best.json", stop_at=config.stop_at, patience=config.patience)

    def see(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether this evaluation is the best of the run. The model before training has no checkpoint, so it never is.

        Raises:
            ValueError: the evaluation has no such metric.
        """
        if self.metric is None:
            return False
        if self.metric not in metrics:
            raise ValueError(f"evaluation.best is {self.metric!r}; an evaluation has {sorted(metrics)}")
        if step == 0 or step == self.step:
            return False
        better = metrics[self.metric] > self.value
        if better:
            self.value, self.step, self.since = metrics[self.metric], step, 0
            self.file.write_text(json.dumps({"metric": self.metric, "value": self.value, "step": step}) + "\n")
        else:
            self.since += 1
        return better

    @property
    def ends(self) -> bool:
        """Whether ``stop_at`` is reached, or ``patience`` evaluations brought nothing better."""
        reached = self.stop_at is not None and self.value >= self.stop_at
        return reached or (self.patience is not None and self.since >= self.patience)

    @property
    def why(self) -> str:
        reached = self.stop_at is not None and self.value >= self.stop_at
        waited = f"{self.since} evaluations without a larger one"
        return f"{self.metric} is {self.value:.4g} at step {self.step}, " + ("as asked" if reached else waited)

    def forget_after(self, step: int) -> None:
        """Go back to the best evaluation up to that step, for a run that continues from a checkpoint."""
        if self.file.exists() and (found := json.loads(self.file.read_text()))["step"] <= step:
            self.value, self.step = found["value"], found["step"]
        else:
            self.file.unlink(missing_ok=True)
