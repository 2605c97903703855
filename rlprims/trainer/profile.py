"""The steps that are profiled: each a folder with a trace and a table of every process."""

from pathlib import Path

from rlprims.execution import Observable, ProfileConfig, Profiler
from rlprims.trainer.loop import Step, Stepper
from rlprims.trainer.writing import writing


class StepProfiles:
    """``begin`` is the last hook of a step, for the next one, and ``end`` the first."""

    def __init__(self, config: ProfileConfig, workers: Observable, directory: Path) -> None:
        self.config, self.workers, self.directory = config, workers, directory
        self.profiler = Profiler()

    def __enter__(self) -> "StepProfiles":
        return self

    def __exit__(self, *error: object) -> None:
        self.profiler.stop()  # of a step that failed

    def begin(self, trainer: Stepper, step: Step | None = None) -> None:
        if trainer.step_number + 1 in self.config.steps:
            self.workers.start_profile(self.config)
            self.profiler.start(self.config)

    def end(self, trainer: Stepper, step: Step) -> None:
        mine = self.profiler.stop()
        if mine is None:
            return
        folder = self.directory / f"step_{step.number:06d}"
        profiles = {"trainer": mine, **self.workers.stop_profile()}
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, profile in profiles.items():
                (folder / f"{name}.json.gz").write_bytes(profile.trace)
                (folder / f"{name}.txt").write_text(profile.table)
