"""A profile of one process, by torch's profiler: a trace for a viewer, and a table for a reader.

:class:`Observed` is the base of a Ray worker: its report, and its profile.
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
    """Of this process, from :meth:`start` to :meth:`stop`; without a start it costs nothing."""

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
        """None if it was not started."""
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
    """A batch that is sampled ahead is sampled in a thread of its own."""
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
