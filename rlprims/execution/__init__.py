"""Where the models run: a Protocol of few verbs, and its local implementation.

``rlprims.execution.local`` is imported by name only, as it loads transformers.
"""

from rlprims.execution._config import ModelConfig, OptimizerConfig, Sampling
from rlprims.execution._protocol import Execution, UpdateReport

__all__ = ["Execution", "ModelConfig", "OptimizerConfig", "Sampling", "UpdateReport"]
