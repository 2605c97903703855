"""Profiles of the steps that the settings name."""

from pathlib import Path

from rlprims.execution import Observable, ProfileConfig, Profiler
from rlprims.runs.disk_errors import writing
from rlprims.runs.steps import Stepper, StepResult


class StepProfiles:
    """Profiles the steps of the config. ``end`` is the first hook of a step; ``begin``, the last, starts the next."""

    def __init__(self, config: ProfileConfig, workers: Observable, directory: Path) -> None:
        self.config, self.workers, self.directory = config, workers, directory
        self.profiler = Profiler()

    def __enter__(self) -> "StepProfiles":
        return self

    def __exit__(self, *error: object) -> None:
        self.profiler.stop()  # still running if the step failed

    def begin(self, trainer: Stepper, step: StepResult | None = None) -> None:
        if trainer.step_number + 1 in self.config.steps:
            self.workers.start_profile(self.config)
            self.profiler.start(self.config)

    def end(self, trainer: Stepper, step: StepResult) -> None:
        if step.number not in self.config.steps:
            return
        folder = self.directory / f"step_{step.number:06d}"
        profiles = {"trainer": self.profiler.stop() or {}, **self.workers.stop_profile()}
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, profile in profiles.items():
                for ending, content in profile.items():
                    (folder / f"{name}{ending}").write_bytes(content)
