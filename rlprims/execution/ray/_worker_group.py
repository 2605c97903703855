"""Groups of Ray actors: ``group.call(Worker.method, ...)`` runs it on the ranks that its ``@dispatch`` says."""

import inspect
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import ray
import torch
from torch import Tensor

from rlprims.batching import balance
from rlprims.data_proto import DataProto
from rlprims.execution.hf import without_tokens
from rlprims.execution.hf._vision import IMAGES
from rlprims.execution.ray._calls import WorkerLost, dispatch, fetch, marked
from rlprims.execution.ray._head import START, wait
from rlprims.execution.ray._pool import Pool

R = TypeVar("R")

SCORED = frozenset({"prompts", "responses", "attention_mask", "response_mask", "kept_ids", "kept_counts"})
"""The columns that a forward pass reads."""
SCORED_BY_POLICY = SCORED | {"routed_experts"}


class Pending(Generic[R]):
    """A call that runs. The driver can do other work and get the result later."""

    def __init__(self, group: "WorkerGroup", refs: Sequence[Any], collect: Callable[[list[Any]], R]) -> None:
        self.group, self.refs, self.collect = group, refs, collect

    def done(self) -> bool:
        """Whether every rank has answered."""
        return not ray.wait(list(self.refs), num_returns=len(self.refs), timeout=0)[1]

    def result(self, timeout: float | None = None) -> R:
        """Wait for every rank, and return the result. A WorkerError: one raised an error; a WorkerLost: one is lost."""
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


class WorkerGroup:
    """Workers of one class, one in each bundle of a pool; docs/controller.md has examples.

    Args:
        worker: a class whose methods have ``@dispatch``, called with ``rank`` and ``size``; a ``functools.partial`` of
            it; or several by role, ``{"actor": Actor, "critic": Critic}``, an object of each in every worker.
        name: in errors, and for drivers that find the workers in a detached pool; by default that of the class.
        size: the number of workers; 0: one for each bundle.
        timeout: seconds of a call.
        same_rows: so many consecutive ranks get the same part of a split batch, as ranks of tensor parallelism do.

    Raises:
        ValueError: the pool is too small, is taken, or was found without workers of this name; ``same_rows`` does not
            divide the size.
    """

    heartbeat: float = math.inf  # seconds in which the process of each must answer a ping while it works

    def __init__(
        self, worker: Any, pool: Pool, *, name: str = "", size: int = 0, timeout: float = math.inf, same_rows: int = 1
    ) -> None:
        size = size or len(pool.bundles)
        together = _together(worker) if isinstance(worker, Mapping) else worker
        self.worker: Any = partial(together).func
        self.name = name or self.worker.__name__
        if not 1 <= size <= len(pool.bundles) or size % same_rows:
            raise ValueError(f"{self.name}: {len(pool.bundles)} bundles for {size} workers, {same_rows} to a part")
        if (pool.groups + 1) * pool.share > 1 and not pool.found:
            raise ValueError(f"{self.name}: the pool is taken; give one group several roles, or Pool(..., share=0.5)")
        self.pool, self.timeout, self.same_rows, self.prefix = pool, timeout, same_rows, ""
        self.order = threading.Lock()
        self.workers = [pool.start(together, rank, size, self.name) for rank in range(size)]
        pool.groups += 1

    def role(self, name: str) -> "WorkerGroup":
        """Return the same workers, for calls of the class of this role."""
        group = copy(self)
        group.prefix, group.name = f"{name}_", f"{self.name} {name}"
        return group

    def call(self, method: Callable[..., Any], *args: Any, together: str | None = None, **kwargs: Any) -> Pending[Any]:
        """Start the method as its ``@dispatch`` says, in one order on all ranks; ``together`` instead of its own."""
        name = self.prefix + method.__name__
        how: dispatch | None = getattr(getattr(self.worker, name, None), "dispatch", None)
        if how is None:
            raise ValueError(f"{self.name}: no method {name} has @dispatch; of several roles, use group.role(ROLE)")
        if together is not None and how.to != "split":
            raise ValueError(f"{self.name}: {name} splits no batch: leave out together")
        ranks, shared, step = len(self.workers), self.same_rows, self.same_rows
        parts: list[tuple[Any, ...]] = [args]
        join: Callable[[list[Any]], Any] = itemgetter(0) if how.to == "first" else list
        if how.to == "split":
            parts, join = _split(args, ranks // shared, replace(how, together=together or how.together))
        elif callable(how.to):
            parts = list(how.to(ranks // shared, *args))
        else:
            shared, step = ranks, 1
        if len(parts) * shared != ranks:
            raise ValueError(f"{self.name}: {name}: expected {ranks // shared} parts from its split, got {len(parts)}")
        if shared > 1:  # the object store has one copy for all
            parts = [tuple(ray.put(x) if isinstance(x, DataProto) else x for x in part) for part in parts]
        called, collect = self.workers[: 1 if how.to == "first" else ranks], how.collect or join
        with self.order:
            refs = [getattr(worker, name).remote(*parts[i // shared], **kwargs) for i, worker in enumerate(called)]
        return Pending(self, refs, lambda results: collect(results[::step]))

    def stop(self) -> None:
        """Kill the workers. Their pool stays."""
        for worker in self.workers:
            ray.kill(worker)
        self.pool.groups -= 1


def _together(roles: Mapping[str, Any]) -> type:
    """A class that holds an object of each role. Its methods are theirs that have ``@dispatch``: ``ROLE_METHOD``."""

    def begin(self: Any, rank: int, size: int) -> None:
        self.roles = {role: partial(worker)(rank, size) for role, worker in roles.items()}

    members: dict[str, Any] = {"__init__": begin, "concurrency_groups": {}}
    for role, worker in roles.items():
        of, kind = partial(lambda role, worker: worker.roles[role], role), partial(worker).func
        members["concurrency_groups"] |= getattr(kind, "concurrency_groups", {})
        for name, method in inspect.getmembers(kind, lambda member: hasattr(member, "dispatch")):
            members[f"{role}_{name}"] = marked(method, method.dispatch, of)
    return type("_".join(roles), (), members)


def _split(args: Sequence[Any], parts: int, how: dispatch) -> tuple[list[tuple[Any, ...]], Callable[[list[Any]], Any]]:
    """The arguments of each part of a batch, and what joins the results."""
    batch = args[0] if args else None
    if not isinstance(batch, DataProto):
        kind = type(batch).__name__
        raise ValueError(f"expected a DataProto to split, got {kind}; for others give @dispatch a function that splits")
    if how.together != "trajectory_ids" and not (how.together in batch and isinstance(batch[how.together], Tensor)):
        raise ValueError(f"expected a tensor of ids {how.together} in the batch, whose equal ids go to one worker")
    whole = padded(batch, parts, together=how.together)
    rows = divided(whole, parts, share_prompts=how.share_prompts, together=how.together)
    sent = columns_of(whole, how.columns)
    of_parts = [(sent.select_idxs(np.array(part, dtype=np.int64)), *args[1:]) for part in rows]
    return of_parts, lambda results: _joined(results, rows, len(batch))


def _joined(results: list[Any], rows: list[list[int]], size: int) -> Any:
    order = torch.tensor([row for part in rows for row in part], dtype=torch.int64)
    if isinstance(results[0], Tensor | DataProto):
        got = [len(result) if isinstance(result, DataProto) or result.ndim else None for result in results]
        if got != [len(part) for part in rows]:
            raise ValueError(f"expected results for parts of {[*map(len, rows)]} rows, got {got}; use collect=")
    if isinstance(results[0], Tensor):
        joined = torch.cat(results)
        return torch.empty_like(joined).index_copy_(0, order, joined)[:size]
    if isinstance(results[0], DataProto):
        return DataProto.concat(results).select_idxs(order.argsort()[:size].numpy())
    return results


def columns_of(batch: DataProto, names: Collection[str] | Literal["tensors", "all"]) -> DataProto:
    """Return the batch with only the tensors of these names, or with all tensors, and images; or with all columns."""
    if names == "all":
        return batch
    there = [name for name in dict(batch.batch.items()) if names == "tensors" or name in names]
    images = [IMAGES] if IMAGES in batch.non_tensor_batch else []
    return batch.select(batch_keys=there, non_tensor_batch_keys=images, meta_info_keys=[])


def divided(batch: DataProto, ranks: int, *, share_prompts: bool, together: str = "trajectory_ids") -> list[list[int]]:
    """Return the rows of each rank, balanced by tokens. Rows with the same id in ``together`` get the same rank.

    With ``share_prompts`` a rank computes a prompt once for all its rows with this prompt. Rows with the same prompt
    then stay on one rank, if the rank with the most tokens has fewer of them so.
    """
    tokens = batch["attention_mask"].sum(-1) if "attention_mask" in batch else torch.ones(len(batch), dtype=torch.int64)
    labels = batch[together].tolist() if together in batch else None
    filled = min(ranks, len(set(range(len(batch)) if labels is None else labels)))  # others have no row
    anywhere = balance(tokens.tolist(), filled, labels) if filled else []
    anywhere += [[] for _ in range(ranks - filled)]
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
    """Add rows without valid tokens (by ``response_mask``), until each rank can have one, and an id of ``together``."""
    missing = ranks - (len(batch[together].unique()) if together in batch else len(batch))
    if missing <= 0 or not len(batch) or "response_mask" not in batch:
        return batch
    spare = batch.select_idxs(np.zeros(missing, dtype=np.int64))
    for name, mask in without_tokens(dict(spare.batch.items())).items():
        spare[name] = mask
    for name in {"trajectory_ids", together} & set(batch.batch.keys()):
        spare[name] = batch[name].max() + 1 + torch.arange(missing)
    return DataProto.concat([batch, spare])
