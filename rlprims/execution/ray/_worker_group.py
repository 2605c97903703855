"""Groups of Ray actors: one call of the driver runs a method on several ranks.

``group.call(Worker.method, ...)`` returns a :class:`Pending` at once. A decorator of the method decides where it runs:
:func:`everywhere` on all ranks with the same arguments, :func:`split` on all ranks with a part of the batch for each,
:func:`first` on rank 0.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from rlprims.data_proto import DataProto
from rlprims.execution._protocol import ExecutionError
from rlprims.execution.ray._division import columns_of, divided, padded
from rlprims.execution.ray._head import wait
from rlprims.execution.ray._reasons import cause_of, reason_of, traceback_of

R = TypeVar("R")
Method = TypeVar("Method", bound=Callable[..., Any])


class WorkerError(ExecutionError):
    """A worker raised an error. The message has the worker's name and the cause, the note the worker's traceback."""


class WorkerRefused(WorkerError, ValueError):
    """A worker raised a ValueError because of its arguments."""


class WorkerLost(ExecutionError):
    """A worker died, or did not answer in time."""


def everywhere(method: Method) -> Method:
    """Call the method with the same arguments on every rank; the result is the list of the ranks' results."""
    return _marked(method, "everywhere")


def split(method: Method) -> Method:
    """Split the first argument, a DataProto, by rows. The parts are balanced by tokens; a trajectory stays in one part.

    If the ranks return tensors or DataProtos, these are joined, with the rows in their original order. Otherwise the
    result is the list of the ranks' results.
    """
    return _marked(method, "split")


def split_by_prompt(method: Method) -> Method:
    """Like :func:`split`, but rows with the same prompt go to one rank if that saves tokens.

    A packed forward pass computes a prompt once for all its rows.
    """
    return _marked(method, "split by prompt")


def reads(columns: Collection[str] | None) -> Callable[[Method], Method]:
    """Send only these columns of a batch that is split; None: all tensors, without columns of objects."""

    def marked(method: Method) -> Method:
        method.columns = columns  # type: ignore[attr-defined]
        return method

    return marked


def first(method: Method) -> Method:
    """Call the method on rank 0 only."""
    return _marked(method, "first")


def _marked(method: Method, how: str) -> Method:
    method.dispatch = how  # type: ignore[attr-defined]
    return method


class Pending(Generic[R]):
    """A call that runs. The driver can do other work and get the result later."""

    def __init__(self, group: "WorkerGroup", refs: Sequence[Any], collect: Callable[[list[Any]], R]) -> None:
        self.group, self.refs, self.collect = group, refs, collect

    def result(self, timeout: float | None = None) -> R:
        """Wait for every rank, and return the joined result.

        Raises:
            WorkerError: a worker raised an error.
            WorkerLost: a worker died or does not answer.
        """
        limit = self.group.timeout if timeout is None else timeout
        # Raise the error of the rank that fails first. The errors of ranks that wait for it come later.
        waiting, results = list(self.refs), dict[Any, Any]()
        while waiting:
            done, waiting = wait(waiting, limit, self._name(waiting))
            if not done:
                raise WorkerLost(f"{self._name(waiting)} did not answer within {limit:g} s")
            for ref in done:
                results[ref] = fetch(ref, self._name([ref]), limit)
        return self.collect([results[ref] for ref in self.refs])

    def _name(self, refs: Sequence[Any]) -> str:
        ranks = [self.refs.index(ref) for ref in refs]
        name = f"{self.group.name} rank {ranks[0]}" if len(ranks) == 1 else f"{self.group.name} ranks {ranks}"
        return f"{name} of {len(self.refs)}"


def fetch(ref: Any, who: str, timeout: float) -> Any:
    """Wait for the result of one worker. An error is raised again with the name of the worker."""
    done, _ = wait([ref], timeout, who)
    if not done:
        raise WorkerLost(f"{who} did not answer within {timeout:g} s")
    try:
        return ray.get(ref, timeout=max(1.0, timeout))
    except RayTaskError as error:
        # The class of Ray's error is also a subclass of the class of its cause.
        failure = (WorkerRefused if isinstance(error, ValueError) else WorkerError)(f"{who}: {cause_of(error)}")
        if not isinstance(error.cause, OSError):  # such a message has path and reason
            failure.add_note(traceback_of(error))
        raise failure from None
    except RayActorError as error:
        raise WorkerLost(f"{who} died: {reason_of(error)}") from None
    except GetTimeoutError:
        raise WorkerLost(f"{who} did not answer within {timeout:g} s") from None


class WorkerGroup:
    """Workers of one class, one for each bundle of a placement group.

    If a batch is split, each group of ``same_rows`` consecutive ranks gets the same rows, and the result of its first
    rank is used.
    """

    def __init__(
        self,
        worker: type,
        count: int,
        *,
        name: str,
        placement_group: Any,
        bundles: Sequence[int],
        cpus: float,
        gpus: float,
        environment: dict[str, str],
        timeout: float,
        same_rows: int = 1,
    ) -> None:
        self.name = name
        self.worker: Any = worker
        self.same_rows = same_rows
        self.timeout = timeout
        self.order = threading.Lock()
        # Ray must not restart a worker, because the new one would have the initial weights.
        self.workers = [
            start_worker(worker, rank, count, placement_group, bundles, cpus=cpus, gpus=gpus, environment=environment)
            for rank in range(count)
        ]

    def call(
        self, method: Callable[..., Any], *args: Any, together: str = "trajectory_ids", **kwargs: Any
    ) -> Pending[Any]:
        """Start a method of the workers' class. Calls from several threads reach all ranks in the same order.

        If a batch is split, rows with the same id in the column ``together`` go to the same rank.
        """
        with self.order:
            return self._call(method, *args, together=together, **kwargs)

    def _call(self, method: Callable[..., Any], *args: Any, together: str, **kwargs: Any) -> Pending[Any]:
        how: str = method.dispatch  # type: ignore[attr-defined]
        name = method.__name__
        if how.startswith("split"):
            return self._split(method, *args, together=together, **kwargs)
        workers = self.workers[:1] if how == "first" else self.workers
        shared = [ray.put(arg) if isinstance(arg, DataProto) else arg for arg in args]
        refs = [getattr(worker, name).remote(*shared, **kwargs) for worker in workers]
        return Pending(self, refs, (lambda results: results[0]) if how == "first" else (lambda results: results))

    def _split(
        self, method: Callable[..., Any], batch: DataProto, *args: Any, together: str, **kwargs: Any
    ) -> Pending[Any]:
        parts = len(self.workers) // self.same_rows
        whole = padded(batch, parts, together=together)
        how: str = method.dispatch  # type: ignore[attr-defined]
        by_prompt = how == "split by prompt"
        rows = divided(whole, parts, share_prompts=by_prompt, together=together)
        # Each rank gets only the columns that it reads.
        sent = columns_of(whole, method.columns) if hasattr(method, "columns") else whole
        of_parts: list[Any] = [sent.select_idxs(np.array(part, dtype=np.int64)) for part in rows]
        if self.same_rows > 1:
            of_parts = [ray.put(part) for part in of_parts]
        refs = [
            getattr(worker, method.__name__).remote(of_parts[rank // self.same_rows], *args, **kwargs)
            for rank, worker in enumerate(self.workers)
        ]
        return Pending(self, refs, lambda results: _joined(results[:: self.same_rows], rows, len(batch)))

    def stop(self) -> None:
        for worker in self.workers:
            ray.kill(worker)


def start_worker(
    worker: type,
    rank: int,
    count: int,
    placement_group: Any,
    bundles: Sequence[int],
    *,
    cpus: float,
    gpus: float,
    environment: dict[str, str],
) -> Any:
    """Start an actor in the bundle of its rank, ``bundles[rank]``; returns the actor's handle."""
    place = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=bundles[rank])
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


def _joined(results: list[Any], rows: list[list[int]], size: int) -> Any:
    order = torch.tensor([row for part in rows for row in part], dtype=torch.int64)
    if isinstance(results[0], Tensor):
        joined = torch.cat(results)
        return torch.empty_like(joined).index_copy_(0, order, joined)[:size]
    if isinstance(results[0], DataProto):
        return DataProto.concat(results).select_idxs(order.argsort()[:size].numpy())
    return results
