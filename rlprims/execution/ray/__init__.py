"""The ``Execution`` protocol on a Ray cluster: FSDP2 ranks train, vLLM engines sample. And its parts: worker groups."""

from rlprims.execution.ray._calls import WorkerError, WorkerLost, dispatch
from rlprims.execution.ray._cluster import connect
from rlprims.execution.ray._execution import RayExecution
from rlprims.execution.ray._pool import Pool
from rlprims.execution.ray._worker_group import Pending, WorkerGroup

__all__ = ["Pending", "Pool", "RayExecution", "WorkerError", "WorkerGroup", "WorkerLost", "connect", "dispatch"]
