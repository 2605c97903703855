"""Profiles of one process by torch's profiler: a trace for a viewer, and a table to read.

:class:`Observed` is the base of Ray workers, :class:`SingleProcess` that of executions in one process.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlprims.execution._config import ProfileConfig
from rlprims.execution._meter import Meter, WorkerReport


class Profile(NamedTuple):
    trace: bytes
    """Chrome's format, compressed by gzip: for ui.perfetto.dev or chrome://tracing."""
    table: str
    """Operators by their own time."""


class Profiler:
    """Profiles this process from :meth:`start` to :meth:`stop`."""

    def __init__(self) -> None:
        self._running: Any = None

    def start(self, config: ProfileConfig) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints messages to the terminal
        self._running = torch.profiler.profile(
            record_shapes=config.shapes,
            profile_memory=config.memory,
            with_stack=config.stacks,
            experimental_config=_all_threads(),
        )
        self._running.start()

    def stop(self) -> Profile | None:
        """The profile; None if it was not started."""
        if self._running is None:
            return None
        running, self._running = self._running, None
        running.stop()
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table: str = running.key_averages().table(sort_by=order, row_limit=50, max_name_column_width=60)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json.gz"
            running.export_chrome_trace(str(path))
            return Profile(path.read_bytes(), table)


def _all_threads() -> Any:
    """Profile all threads: a prefetched batch is sampled in another thread."""
    try:
        return torch.profiler._ExperimentalConfig(profile_all_threads=True)  # type: ignore[attr-defined]
    except TypeError:
        return None  # an older torch records only the thread that started it


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


class SingleProcess:
    """The reports of an execution in the caller's process, whose profile the caller makes."""

    meter: Meter

    def reports(self) -> list[WorkerReport]:
        return [self.meter.report("local")]

    def start_profile(self, config: ProfileConfig) -> None:
        """Does nothing: there is no other process."""

    def stop_profile(self) -> dict[str, Profile]:
        return {}
