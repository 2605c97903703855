"""Where the models run: a Protocol of few verbs, and its local implementation.

``rlprims.execution.local`` is imported by name only, as it loads transformers.
"""

from rlprims.execution._config import LoraConfig, ModelConfig, OptimizerConfig, ProfileConfig, RayConfig, Sampling
from rlprims.execution._kept import kept_columns, kept_of
from rlprims.execution._meter import Work, WorkerReport
from rlprims.execution._profile import Profile, Profiler
from rlprims.execution._protocol import Execution, ExecutionError, UpdateReport

__all__ = [
    "Execution",
    "ExecutionError",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Profile",
    "ProfileConfig",
    "Profiler",
    "RayConfig",
    "Sampling",
    "UpdateReport",
    "Work",
    "WorkerReport",
    "kept_columns",
    "kept_of",
]
