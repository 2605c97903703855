"""What the processes of an execution report: the work since the last report, the memory, and profiles by torch."""

import os
import pickle
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from rlprims.data_proto import DataProto
from rlprims.execution._config import ProfileConfig

Method = TypeVar("Method", bound=Callable[..., Any])


class Work(NamedTuple):
    """The work of one verb."""

    seconds: float = 0.0
    tokens: int = 0
    """For ``generate`` the sampled tokens; for other verbs the tokens that were read, without padding."""
    flops: float = 0.0
    """Operations of the model by :mod:`rlprims.execution.hf._flops`; 0 for verbs that do not train."""


class WorkerReport(NamedTuple):
    """The work and the memory of one worker."""

    worker: str
    work: dict[str, Work]
    peak_flops: float
    """The peak rate of its device, in FLOP/s."""
    peak_memory: int
    """Bytes: the largest memory that the process used; with a GPU, the largest that was allocated on it."""


@dataclass
class Meter:
    """Counts the work of one worker."""

    costs: Mapping[str, Callable[[DataProto], float]] = field(default_factory=dict)
    """For each verb a function from a batch to its operations."""
    peak: Callable[[], float] = lambda: 0.0
    """Returns the FLOP/s of the device."""
    work: dict[str, Work] = field(default_factory=dict)

    def add(self, verb: str, work: Work) -> None:
        before = self.work.get(verb, Work())
        self.work[verb] = Work(before.seconds + work.seconds, before.tokens + work.tokens, before.flops + work.flops)

    def report(self, worker: str) -> WorkerReport:
        """The work since the last report."""
        work, self.work = self.work, {}
        return WorkerReport(worker, work, self.peak(), _peak_memory())


def metered(method: Method) -> Method:
    """Decorates a verb: the object's ``meter`` counts its work, and a profile shows its name."""
    verb = method.__name__

    @wraps(method)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        with torch.profiler.record_function(f"{type(self).__name__}.{verb}"):
            result = method(self, *args, **kwargs)
        seconds = time.perf_counter() - begun
        cost = self.meter.costs.get(verb)
        self.meter.add(verb, Work(seconds, _tokens(result, args), cost(args[0]) if cost else 0.0))
        return result

    return counted  # type: ignore[return-value]


def _tokens(result: Any, args: Sequence[Any]) -> int:
    if isinstance(result, DataProto) and "response_mask" in result:
        return int(result["response_mask"].sum())
    return sum(int(batch["attention_mask"].sum()) for batch in args[:1] if isinstance(batch, DataProto))


def _peak_memory() -> int:
    if torch.cuda.is_available() and (peak := torch.cuda.max_memory_allocated()):  # 0: its models are on the CPU
        return peak
    with suppress(OSError):  # of this program; getrusage also counts the program before exec
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return int(found[1]) * 1024
    kilobytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes


Profile: TypeAlias = dict[str, bytes]
"""Files by their endings: ``.json.gz`` in Chrome's format, for ui.perfetto.dev, and ``.txt``; or ``.pickle``."""


@contextmanager
def _profiled(config: ProfileConfig, files: Profile) -> Iterator[None]:
    """Profile the block, and add the files."""
    if config.tool == "nsys":
        with torch.cuda.profiler.profile(), torch.autograd.profiler.emit_nvtx(record_shapes=config.shapes):  # type: ignore[no-untyped-call]
            yield
        return
    if config.tool == "memory":
        torch.cuda.memory._record_memory_history()
        yield
        files[".pickle"] = pickle.dumps(torch.cuda.memory._snapshot())
        torch.cuda.memory._record_memory_history(None)
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints messages to the terminal
    try:  # a prefetched batch is sampled in another thread
        threads: Any = torch.profiler._ExperimentalConfig(profile_all_threads=True)  # type: ignore[attr-defined]
    except TypeError:  # an older torch records only the thread that started it
        threads = None
    options: Any = {"record_shapes": config.shapes, "profile_memory": config.memory, "with_stack": config.stacks}
    with torch.profiler.profile(**options, experimental_config=threads) as running:
        yield
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    files[".txt"] = running.key_averages().table(order, row_limit=50, max_name_column_width=60).encode()
    with tempfile.NamedTemporaryFile(suffix=".json.gz") as file:
        running.export_chrome_trace(file.name)
        files[".json.gz"] = Path(file.name).read_bytes()


class Profiler:
    """Profiles this process from :meth:`start` to :meth:`stop`."""

    _running: AbstractContextManager[None] | None = None

    def start(self, config: ProfileConfig) -> None:
        if config.tool == "torch" or torch.cuda.is_available():  # the trainer's process may have no GPU
            self._files: Profile = {}
            self._running = _profiled(config, self._files)
            self._running.__enter__()

    def stop(self) -> Profile | None:
        """The profile; None if it was not started."""
        if self._running is None:
            return None
        running, self._running = self._running, None
        running.__exit__(None, None, None)
        return self._files


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
