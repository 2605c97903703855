"""Where the models run: protocols of the policy, of each model beside it and of reports; and their settings.

``rlprims.execution.local`` is imported by name only, as it loads transformers.
"""

from rlprims.execution._config import LoraConfig, ModelConfig, OptimizerConfig, ProfileConfig, RayConfig, Sampling
from rlprims.execution._kept import kept_columns, kept_of
from rlprims.execution._meter import Work, WorkerReport
from rlprims.execution._profile import Profile, Profiler
from rlprims.execution._protocol import (
    Critic,
    Execution,
    ExecutionError,
    Finish,
    Models,
    Observable,
    RewardScorer,
    Teacher,
    UpdateReport,
)
from rlprims.execution._stored import Kind, kind_of, reads_means, reads_reference
from rlprims.execution._stream import BatchStream, Stream

__all__ = [
    "BatchStream",
    "Critic",
    "Execution",
    "ExecutionError",
    "Finish",
    "Kind",
    "LoraConfig",
    "ModelConfig",
    "Models",
    "Observable",
    "OptimizerConfig",
    "Profile",
    "ProfileConfig",
    "Profiler",
    "RayConfig",
    "RewardScorer",
    "Sampling",
    "Stream",
    "Teacher",
    "UpdateReport",
    "Work",
    "WorkerReport",
    "kept_columns",
    "kept_of",
    "kind_of",
    "reads_means",
    "reads_reference",
]
