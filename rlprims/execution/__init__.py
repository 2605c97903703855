"""Where the models run: a Protocol of few verbs, and its local implementation.

``rlprims.execution.local`` is imported by name only, as it loads transformers.
"""

from rlprims.execution._config import ModelConfig, OptimizerConfig, RayConfig, Sampling
from rlprims.execution._protocol import Execution, ExecutionError, UpdateReport

__all__ = ["Execution", "ExecutionError", "ModelConfig", "OptimizerConfig", "RayConfig", "Sampling", "UpdateReport"]
