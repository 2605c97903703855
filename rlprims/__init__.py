"""RL algorithm primitives for LLM post-training.

A module is imported when it is first used: ``import rlprims`` is fast, and ``rlprims.losses`` imports torch::

    from rlprims import advantage, losses
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = (
    "advantage", "algorithms", "audit", "batching", "controllers", "corrections", "diagnostics", "ended", "filters",
    "grouping", "layout", "logprobs", "losses", "masking", "ratios", "rewards", "routing", "scan", "testing",
    "trajectories", "turns", "types",
)  # fmt: skip

__all__ = ["DataProto", "__version__", *_MODULES]

if TYPE_CHECKING:
    from rlprims.data_proto import DataProto


def __getattr__(name: str) -> Any:
    if name == "DataProto":
        return importlib.import_module("rlprims.data_proto").DataProto
    if name in _MODULES:
        return importlib.import_module(f"rlprims.{name}")
    raise AttributeError(f"module 'rlprims' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
