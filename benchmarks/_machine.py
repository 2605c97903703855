"""Where and with what the numbers were taken."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("rlprims", "verl", "trl", "torchrl", "liger-kernel", "torch", "numpy", "tensordict", "transformers")


def describe() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Of what is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
