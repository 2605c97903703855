"""One controller, many workers: a method of the group is called once, and runs on the ranks that it names.

A worker's methods say how they are called: :func:`everywhere` with the same arguments, :func:`split` with a part of the
batch for each rank, :func:`first` on rank 0. ``group.call(Worker.method, ...)`` gives a :class:`Pending` at once.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from rlprims.batching import balance
from rlprims.data_proto import DataProto
from rlprims.execution._protocol import ExecutionError
from rlprims.execution.hf import without_tokens

R = TypeVar("R")
Method = TypeVar("Method", bound=Callable[..., Any])


class WorkerError(ExecutionError):
    """A worker raised; the message has its rank and its traceback."""


class WorkerRefused(WorkerError, ValueError):
    """A worker was asked for what cannot be: the ValueError of one process."""


class WorkerLost(ExecutionError):
    """A worker died, or did not answer in time."""


def everywhere(method: Method) -> Method:
    """The same arguments on every rank; the ranks' results in a list."""
    return _marked(method, "everywhere")


def split(method: Method) -> Method:
    """The first argument is a DataProto: each rank has some of its rows, balanced by tokens, rollouts whole.

    Tensors and DataProtos come back as one, rows in their first order; other results in a list.
    """
    return _marked(method, "split")


def first(method: Method) -> Method:
    """On rank 0 alone."""
    return _marked(method, "first")


def _marked(method: Method, how: str) -> Method:
    method.dispatch = how  # type: ignore[attr-defined]
    return method


class Pending(Generic[R]):
    """A call that is under way; the driver may go on meanwhile."""

    def __init__(self, group: "WorkerGroup", refs: Sequence[Any], collect: Callable[[list[Any]], R]) -> None:
        self.group, self.refs, self.collect = group, refs, collect

    def result(self, timeout: float | None = None) -> R:
        """Wait for every rank.

        Raises:
            WorkerError: one of them raised.
            WorkerLost: one died or is silent.
        """
        wait = self.group.timeout if timeout is None else timeout
        # The first to fail is told, and not the one that waits for it.
        waiting, results = list(self.refs), dict[Any, Any]()
        while waiting:
            done, waiting = ray.wait(waiting, timeout=wait)
            if not done:
                silent = [self.refs.index(ref) for ref in waiting]
                raise WorkerLost(f"{self.group.name}: ranks {silent} did not answer within {wait:g} s")
            for ref in done:
                results[ref] = fetch(ref, f"{self.group.name} rank {self.refs.index(ref)} of {len(self.refs)}", wait)
        return self.collect([results[ref] for ref in self.refs])


def fetch(ref: Any, who: str, timeout: float) -> Any:
    """The result of one worker, or its error in words."""
    try:
        return ray.get(ref, timeout=timeout)
    except RayTaskError as error:
        # Ray's error is of its cause's class too.
        kind = WorkerRefused if isinstance(error, ValueError) else WorkerError
        raise kind(f"{who} raised:\n{error}") from None
    except RayActorError as error:
        raise WorkerLost(f"{who} died: {reason_of(error)}") from None
    except GetTimeoutError:
        raise WorkerLost(f"{who} did not answer within {timeout:g} s") from None


def reason_of(error: RayActorError) -> str:
    """What Ray knows of a death: its first sentence, and the exception if one was the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


class WorkerGroup:
    """Workers of one class, a rank each, in the bundles of a placement group."""

    def __init__(
        self,
        worker: type,
        count: int,
        *,
        name: str,
        placement_group: Any,
        cpus: float,
        gpus: float,
        environment: dict[str, str],
        timeout: float,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.order = threading.Lock()
        # A worker that restarts by itself would serve the weights of the beginning.
        self.workers = [
            start_worker(worker, rank, count, placement_group, cpus=cpus, gpus=gpus, environment=environment)
            for rank in range(count)
        ]

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending[Any]:
        """Start a method of the workers' class; calls from several threads reach all ranks in one order."""
        with self.order:
            return self._call(method, *args, **kwargs)

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending[Any]:
        how: str = method.dispatch  # type: ignore[attr-defined]
        name = method.__name__
        if how == "split":
            return self._split(name, *args, **kwargs)
        workers = self.workers[:1] if how == "first" else self.workers
        shared = [ray.put(arg) if isinstance(arg, DataProto) else arg for arg in args]
        refs = [getattr(worker, name).remote(*shared, **kwargs) for worker in workers]
        return Pending(self, refs, (lambda results: results[0]) if how == "first" else (lambda results: results))

    def _split(self, name: str, batch: DataProto, *args: Any, **kwargs: Any) -> Pending[Any]:
        padded = _padded(batch, len(self.workers))
        lengths = padded["attention_mask"].sum(-1).tolist()
        rollouts = padded["trajectory_ids"].tolist() if "trajectory_ids" in padded else None
        rows = balance(lengths, len(self.workers), rollouts) if lengths else [[] for _ in self.workers]
        refs = [
            getattr(worker, name).remote(padded.select_idxs(np.array(part, dtype=np.int64)), *args, **kwargs)
            for worker, part in zip(self.workers, rows, strict=True)
        ]
        return Pending(self, refs, lambda results: _joined(results, rows, len(batch)))

    def stop(self) -> None:
        for worker in self.workers:
            ray.kill(worker)


def start_worker(
    worker: type,
    rank: int,
    count: int,
    placement_group: Any,
    *,
    cpus: float,
    gpus: float,
    environment: dict[str, str],
) -> Any:
    """The handle of a new actor in its bundle."""
    place = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=rank)
    return (
        ray.remote(worker)
        .options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=0,
            scheduling_strategy=place,
            runtime_env={"env_vars": environment},
        )
        .remote(rank, count)
    )


def _padded(batch: DataProto, ranks: int) -> DataProto:
    """At least a row, and a rollout, for each rank; a row that is added has no token that counts."""
    missing = ranks - (len(batch["trajectory_ids"].unique()) if "trajectory_ids" in batch else len(batch))
    if missing <= 0 or not len(batch):
        return batch
    spare = batch.select_idxs(np.zeros(missing, dtype=np.int64))
    for name, mask in without_tokens(dict(spare.batch.items())).items():
        spare[name] = mask
    if "trajectory_ids" in batch:
        spare["trajectory_ids"] = batch["trajectory_ids"].max() + 1 + torch.arange(missing)
    return DataProto.concat([batch, spare])


def _joined(results: list[Any], rows: list[list[int]], size: int) -> Any:
    order = torch.tensor([row for part in rows for row in part], dtype=torch.int64)
    if isinstance(results[0], Tensor):
        joined = torch.cat(results)
        return torch.empty_like(joined).index_copy_(0, order, joined)[:size]
    if isinstance(results[0], DataProto):
        return DataProto.concat(results).select_idxs(order.argsort()[:size].numpy())
    return results
