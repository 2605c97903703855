"""The same contract on a cluster: Ray actors, FSDP2 ranks that train, vLLM engines that sample."""

from rlprims._imports import uncollected

with uncollected():
    from rlprims.execution.ray._execution import RayExecution

__all__ = ["RayExecution"]
