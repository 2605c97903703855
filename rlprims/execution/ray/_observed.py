"""The base of a Ray worker: its report, and its profile."""

from rlprims.execution._config import ProfileConfig
from rlprims.execution._meter import Meter, WorkerReport
from rlprims.execution._profile import Profile, Profiler


class Observed:
    """A worker with a report of its work and a profile."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.profiler = Profiler()

    def report(self, name: str) -> WorkerReport:
        return self.meter.report(name)

    def start_profile(self, name: str, config: ProfileConfig) -> None:
        self.profiler.start(config)

    def stop_profile(self, name: str) -> Profile | None:
        return self.profiler.stop()
