"""Where the models run: protocols of the policy, of each model beside it and of reports; and their settings.

``rlprims.execution.local`` is imported by name only, as it loads transformers.
"""

from rlprims.execution._columns import Kind, kept_columns, kept_of, kind_of, reads_means, reads_reference
from rlprims.execution._config import (
    EvaluatedSampling, LoraConfig, ModelConfig, OptimizerConfig, ProfileConfig, Sampling,
)  # fmt: skip
from rlprims.execution._observed import Profile, Profiler, Work, WorkerReport
from rlprims.execution._protocol import (
    BatchStream, Critic, Execution, ExecutionError, Finish, Models, Observable, RewardScorer, RunNeeds, Stream,
    Teacher, UpdateReport,
)  # fmt: skip
from rlprims.execution._ray_config import PoolConfig, RayConfig

__all__ = [
    "BatchStream", "Critic", "EvaluatedSampling", "Execution", "ExecutionError", "Finish", "Kind", "LoraConfig",
    "ModelConfig", "Models", "Observable", "OptimizerConfig", "PoolConfig", "Profile", "ProfileConfig", "Profiler",
    "RayConfig", "RewardScorer", "RunNeeds", "Sampling", "Stream", "Teacher", "UpdateReport", "Work", "WorkerReport",
    "kept_columns", "kept_of", "kind_of", "reads_means", "reads_reference",
]  # fmt: skip
