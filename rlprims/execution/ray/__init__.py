"""The ``Execution`` protocol on a Ray cluster: FSDP2 ranks train, vLLM engines sample."""

from rlprims.execution.ray._execution import RayExecution

__all__ = ["RayExecution"]
