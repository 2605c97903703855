"""Groups of Ray actors: ``group.call(Worker.method, ...)`` runs it on the ranks that its decorator says."""

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from rlprims.batching import balance
from rlprims.data_proto import DataProto
from rlprims.execution.hf import without_tokens
from rlprims.execution.ray._calls import Dispatch, WorkerLost, fetch
from rlprims.execution.ray._head import START, wait

R = TypeVar("R")

SCORED = frozenset({"prompts", "responses", "attention_mask", "response_mask", "kept_ids", "kept_counts"})
"""The columns that a forward pass reads."""
SCORED_BY_POLICY = SCORED | {"routed_experts"}


class Pending(Generic[R]):
    """A call that runs. The driver can do other work and get the result later."""

    def __init__(self, group: "WorkerGroup", refs: Sequence[Any], collect: Callable[[list[Any]], R]) -> None:
        self.group, self.refs, self.collect = group, refs, collect

    def result(self, timeout: float | None = None) -> R:
        """Wait for every rank, and return the joined result. A worker's error is raised as in :func:`fetch`."""
        limit, pulse = self.group.timeout if timeout is None else timeout, self.group.heartbeat / 2
        end = time.monotonic() + limit
        # Raise the error of the rank that fails first. The errors of ranks that wait for it come later.
        waiting, results = list(self.refs), dict[Any, Any]()
        while waiting:
            done, waiting = wait(waiting, min(pulse, end - time.monotonic()), self._name(waiting))
            if not done and time.monotonic() >= end:
                raise WorkerLost(f"{self._name(waiting)} did not answer within {limit:g} s")
            if not done and START.get().end == math.inf:  # imports and the loading of models answer no ping
                self._ping(waiting, pulse)
            for ref in done:
                results[ref] = fetch(ref, self._name([ref]), limit)
        return self.collect([results[ref] for ref in self.refs])

    def _ping(self, refs: Sequence[Any], timeout: float) -> None:
        """Raise a WorkerLost if the process of a rank does not answer."""
        for ref in refs:
            ping, name = self.group.workers[self.refs.index(ref)].ping.remote(), self._name([ref])
            if not wait([ping], timeout, name)[0]:
                raise WorkerLost(f"{name} answered no ping within {timeout:g} s: its process is stopped, or hangs")

    def _name(self, refs: Sequence[Any]) -> str:
        ranks = [self.refs.index(ref) for ref in refs]
        name = f"{self.group.name} rank {ranks[0]}" if len(ranks) == 1 else f"{self.group.name} ranks {ranks}"
        return f"{name} of {len(self.refs)}"


class Place(NamedTuple):
    """Where the workers of a pool run, and what each of them gets."""

    placement_group: Any
    bundles: list[int]  # of each rank
    cpus: float
    gpus: float
    environment: dict[str, str]

    def start(self, worker: type, rank: int, count: int) -> Any:
        """Start an actor in the bundle of its rank; returns the actor's handle."""
        bundle = PlacementGroupSchedulingStrategy(self.placement_group, self.bundles[rank])
        actor = ray.remote(
            num_cpus=self.cpus,
            num_gpus=self.gpus,
            max_restarts=0,  # a worker that Ray restarts would have the initial weights
            scheduling_strategy=bundle,
            runtime_env={"env_vars": self.environment},
            concurrency_groups=getattr(worker, "threads", None),
        )(worker)
        return actor.remote(rank, count)


class WorkerGroup:
    """Workers of one class, each in its bundle. ``same_rows`` consecutive ranks get the same part of a split batch."""

    heartbeat = math.inf  # seconds in which the process of each must answer a ping while it works

    def __init__(self, worker: type, size: int, place: Place, *, name: str, timeout: float, same_rows: int = 1) -> None:
        self.worker: Any = worker
        self.name, self.timeout, self.same_rows = name, timeout, same_rows
        self.order = threading.Lock()
        self.workers = [place.start(worker, rank, size) for rank in range(size)]

    def call(
        self, method: Callable[..., Any], *args: Any, together: str = "trajectory_ids", **kwargs: Any
    ) -> Pending[Any]:
        """Start the method on the ranks, in one order for all; rows with equal ids in ``together`` share a rank."""
        dispatch: Dispatch = getattr(self.worker, method.__name__).dispatch
        methods = [getattr(worker, method.__name__) for worker in self.workers]
        with self.order:
            if dispatch.where == "split":
                return self._split(methods, dispatch, *args, together=together, **kwargs)
            is_first = dispatch.where == "first"
            shared = [ray.put(arg) if isinstance(arg, DataProto) else arg for arg in args]
            refs = [start.remote(*shared, **kwargs) for start in (methods[:1] if is_first else methods)]
            return Pending(self, refs, lambda results: results[0] if is_first else results)

    def _split(
        self, methods: list[Any], dispatch: Dispatch, batch: DataProto, *args: Any, together: str, **kwargs: Any
    ) -> Pending[Any]:
        parts = len(self.workers) // self.same_rows
        whole = padded(batch, parts, together=together)
        rows = divided(whole, parts, share_prompts=dispatch.by_prompt, together=together)
        sent = columns_of(whole, dispatch.columns)
        of_parts: list[Any] = [sent.select_idxs(np.array(part, dtype=np.int64)) for part in rows]
        if self.same_rows > 1:
            of_parts = [ray.put(part) for part in of_parts]
        refs = [start.remote(of_parts[rank // self.same_rows], *args, **kwargs) for rank, start in enumerate(methods)]
        return Pending(self, refs, lambda results: _joined(results[:: self.same_rows], rows, len(batch)))

    def stop(self) -> None:
        for worker in self.workers:
            ray.kill(worker)


def _joined(results: list[Any], rows: list[list[int]], size: int) -> Any:
    order = torch.tensor([row for part in rows for row in part], dtype=torch.int64)
    if isinstance(results[0], Tensor):
        joined = torch.cat(results)
        return torch.empty_like(joined).index_copy_(0, order, joined)[:size]
    if isinstance(results[0], DataProto):
        return DataProto.concat(results).select_idxs(order.argsort()[:size].numpy())
    return results


def columns_of(batch: DataProto, names: Collection[str] | Literal["tensors", "all"]) -> DataProto:
    """Return the batch with only the tensors of these names, or with all tensors; or with all columns."""
    if names == "all":
        return batch
    there = [name for name in dict(batch.batch.items()) if names == "tensors" or name in names]
    return batch.select(batch_keys=there, non_tensor_batch_keys=[], meta_info_keys=[])


def divided(batch: DataProto, ranks: int, *, share_prompts: bool, together: str = "trajectory_ids") -> list[list[int]]:
    """Return the rows of each rank, balanced by tokens. Rows with the same id in ``together`` get the same rank.

    With ``share_prompts`` a rank computes a prompt once for all its rows with this prompt. Rows with the same prompt
    then stay on one rank, if the rank with the most tokens has fewer of them so.
    """
    tokens = batch["attention_mask"].sum(-1)
    labels = batch[together].tolist() if together in batch else None
    anywhere = balance(tokens.tolist(), ranks, labels) if len(batch) else [[] for _ in range(ranks)]
    if not share_prompts or labels is not None or not len(batch):
        return anywhere
    width = batch["prompts"].shape[1]
    in_prompt = batch["attention_mask"][:, :width].bool()
    known = torch.where(in_prompt, batch["prompts"], -1)
    prompts = torch.unique(known, dim=0, return_inverse=True)[1].numpy()
    lengths = in_prompt.sum(-1).numpy()
    responses = tokens.numpy() - lengths
    first = np.zeros(len(batch), dtype=bool)
    first[np.unique(prompts, return_index=True)[1]] = True
    if first.sum() < ranks:
        return anywhere

    def most(parts: list[list[int]]) -> int:
        once = (lengths[part][np.unique(prompts[part], return_index=True)[1]].sum() for part in parts)
        return max(int(responses[part].sum() + shared) for part, shared in zip(parts, once, strict=True))

    by_prompt = balance((responses + first * lengths).tolist(), ranks, prompts.tolist())
    return min(anywhere, by_prompt, key=most)


def padded(batch: DataProto, ranks: int, *, together: str = "trajectory_ids") -> DataProto:
    """Add rows without valid tokens, until each rank can have a row (and an id of the column ``together``)."""
    missing = ranks - (len(batch[together].unique()) if together in batch else len(batch))
    if missing <= 0 or not len(batch):
        return batch
    spare = batch.select_idxs(np.zeros(missing, dtype=np.int64))
    for name, mask in without_tokens(dict(spare.batch.items())).items():
        spare[name] = mask
    for name in {"trajectory_ids", together} & set(batch.batch.keys()):
        spare[name] = batch[name].max() + 1 + torch.arange(missing)
    return DataProto.concat([batch, spare])
