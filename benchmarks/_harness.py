"""Time functions side by side: interleaved rounds, process CPU time, medians of per-round ratios.

Wall time on a shared machine measures the neighbours. The CPU time of one thread hardly does, and interleaving gives
every function the same share of what is left (memory bandwidth, clock frequency).
"""

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor

Function = Callable[[], Any]

SHORTEST = 5e-3  # seconds that one measurement lasts at least, by repetition
MIB = 2**20


def settle_allocator() -> None:
    """Free one buffer just below 32 MiB, as any training process has done early on.

    glibc from then on keeps freed memory of that size; before, a first case would pay for fresh pages and a later one
    would not. Larger arrays are given back to the system at each free, here as there.
    """
    torch.ones(31 * MIB, dtype=torch.uint8)


@dataclass(frozen=True)
class Case:
    """The same work done by us and by each peer, and how far an answer is from the float64 one."""

    family: str
    name: str
    ours: Function
    peers: dict[str, Function]
    error: Callable[[Any], float]
    floor_bytes: int = 0  # what must be read and written once; 0 where bytes are not the limit


@dataclass(frozen=True)
class Row:
    """One function in one case. ``ratio`` is its time over ours: above 1 we are faster."""

    family: str
    case: str
    who: str
    milliseconds: float
    ratio: float
    error: float | None  # None: nothing to compute wrongly
    peak_mib: float | None  # None: cannot be measured here
    rounds: int
    spread: tuple[float, float] = field(default=(1.0, 1.0))  # quartiles of the per-round ratios


def measure(case: Case, seconds: float, min_rounds: int) -> list[Row]:
    """Check every function once, then time them in turn for about ``seconds`` of CPU time."""
    functions = {"rlprims": case.ours, **case.peers}
    errors: dict[str, float | None] = {}
    peaks: dict[str, float | None] = {}
    repeats: dict[str, int] = {}
    for who, function in functions.items():
        answer, peaks[who] = with_peak(function)
        errors[who] = case.error(answer)
        del answer
        repeats[who] = max(1, round(SHORTEST / max(_cpu_seconds(function, 1), 1e-6)))
    if case.floor_bytes:
        functions["copy"], errors["copy"], peaks["copy"] = _copy(case.floor_bytes), None, None
        repeats["copy"] = max(1, round(SHORTEST / max(_cpu_seconds(functions["copy"], 1), 1e-6)))

    times: dict[str, list[float]] = {who: [] for who in functions}
    began = process_time()
    while len(times["rlprims"]) < min_rounds or process_time() - began < seconds:
        for who, function in functions.items():
            times[who].append(_cpu_seconds(function, repeats[who]))

    rows = []
    for who, spent in times.items():
        ratios = sorted(theirs / ours for theirs, ours in zip(spent, times["rlprims"], strict=True))
        rows.append(
            Row(
                family=case.family,
                case=case.name,
                who=who,
                milliseconds=1e3 * median(spent),
                ratio=median(ratios),
                error=errors[who],
                peak_mib=peaks[who],
                rounds=len(spent),
                spread=(ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]),
            )
        )
    return rows


def by_formulas(function: Function) -> Function:
    """The same call without kernels."""

    def run() -> Any:
        before = os.environ.get("RLPRIMS_KERNELS")
        os.environ["RLPRIMS_KERNELS"] = "0"
        try:
            return function()
        finally:
            del os.environ["RLPRIMS_KERNELS"]
            if before is not None:
                os.environ["RLPRIMS_KERNELS"] = before

    return run


def largest_error(got: Iterable[Tensor], want: Iterable[Tensor], where: Tensor | None = None) -> float:
    """max |got - want| / max |want|, the worst of the pairs, over ``where``."""
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        difference = (g.detach().double() - w).abs()
        if where is not None:
            difference = torch.where(where, difference, 0.0)
        worst = max(worst, float(difference.max()) / float(w.abs().max()))
    return worst


def _cpu_seconds(function: Function, repeats: int) -> float:
    began = process_time()
    for _ in range(repeats):
        function()
    return (process_time() - began) / repeats


def _copy(size: int) -> Function:
    """Reads and writes ``size`` bytes in all, between buffers that exist: as fast as this machine goes."""
    source = torch.zeros(size // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def with_peak(function: Function) -> tuple[Any, float | None]:
    """The answer, and how far resident memory rose meanwhile; good to about one array, for freed memory is reused."""
    gc.collect()
    if not sys.platform.startswith("linux"):
        return function(), None
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # resets the high-water mark
        before = _resident("VmRSS")
        answer = function()
        return answer, max(0.0, _resident("VmHWM") - before)
    except OSError:
        return function(), None


def _resident(which: str) -> float:
    with open("/proc/self/status") as f:
        kib = next(line.split()[1] for line in f if line.startswith(which))
    return int(kib) * 1024 / MIB
