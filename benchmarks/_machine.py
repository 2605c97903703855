"""Where and with what the numbers were taken."""

import datetime
import os
import platform
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from time import process_time
from typing import Any

import torch

PACKAGES = ("rlprims", "verl", "trl", "torchrl", "liger-kernel", "torch", "numpy", "tensordict", "transformers")


def describe() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "commit": commit(),
    }


def rates() -> dict[str, float]:
    """What one thread reaches here at best: the floor under every row, in GB or 1e9 operations a second."""
    source = torch.zeros(16 * 2**20)
    target, exponents = torch.empty_like(source), torch.zeros(2**16)
    single = torch.randn(1024, 1024)
    half = single.bfloat16()
    flops, moved = 2 * 1024**3, 2 * source.nbytes
    return {
        "copy GB/s": moved / _best(lambda: target.copy_(source)) / 1e9,
        "copy to fresh pages GB/s": moved / _best(source.clone) / 1e9,
        "exp G/s": exponents.numel() / _best(exponents.exp) / 1e9,
        "float32 product GFLOP/s": flops / _best(lambda: single @ single) / 1e9,
        "bfloat16 product GFLOP/s": flops / _best(lambda: half @ half) / 1e9,
    }


def _best(function: Callable[[], Any]) -> float:
    """CPU seconds of a call, the least of several."""

    def seconds() -> float:
        began = process_time()
        function()
        return process_time() - began

    return min(seconds() for _ in range(20))


def versions() -> dict[str, str]:
    """Of what is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Of the tree that is measured; ``+`` if files of it are changed."""

    def git(*arguments: str) -> str:
        found = subprocess.run(("git", *arguments), capture_output=True, text=True)
        return found.stdout.strip()

    return (git("rev-parse", "--short=7", "HEAD") or "unknown") + ("+" if git("diff", "--name-only", "HEAD") else "")


def made(command: str) -> str:
    """The line under a table: what measured it, when and where."""
    machine = describe()
    where = f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, torch {version('torch')}"
    return f"Measured by `{command}` at {machine['commit']}, {datetime.date.today().isoformat()}: {where}."


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
