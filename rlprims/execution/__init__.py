"""Where the models run: a protocol of the loop's verbs, a protocol of reports and profiles, and their settings.

``rlprims.execution.local`` is imported by name only, as it loads transformers.
"""

from rlprims._imports import uncollected

with uncollected():
    from rlprims.execution._config import LoraConfig, ModelConfig, OptimizerConfig, ProfileConfig, RayConfig, Sampling
    from rlprims.execution._kept import kept_columns, kept_of
    from rlprims.execution._meter import Work, WorkerReport
    from rlprims.execution._profile import Profile, Profiler
    from rlprims.execution._protocol import Execution, ExecutionError, Observable, Stream, UpdateReport
    from rlprims.execution._stored import Kind, kind_of, reads_means, reads_reference
    from rlprims.execution._stream import BatchStream

__all__ = [
    "BatchStream",
    "Execution",
    "ExecutionError",
    "Kind",
    "LoraConfig",
    "ModelConfig",
    "Observable",
    "OptimizerConfig",
    "Profile",
    "ProfileConfig",
    "Profiler",
    "RayConfig",
    "Sampling",
    "Stream",
    "UpdateReport",
    "Work",
    "WorkerReport",
    "kept_columns",
    "kept_of",
    "kind_of",
    "reads_means",
    "reads_reference",
]
