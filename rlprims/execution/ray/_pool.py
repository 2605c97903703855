"""Pools: reserved places on a cluster, in which the workers of a group start."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlprims.execution import ExecutionError, PoolConfig
from rlprims.execution.ray._head import HEAD, START

_OURS = "rlprims "  # begins the names of detached placement groups, and the namespaces of their workers


class Pool(AbstractContextManager["Pool"]):
    """A placement group with one bundle for each worker; docs/controller.md has examples.

    A ``with`` block removes it at its end, and its workers with it; a detached one only :meth:`remove`.

    Args:
        config: None: find the pool that another driver has detached. A group on it finds the workers of its name.
        share: the part of its bundle that each worker takes: 0.5 for two groups, whose ranks i share bundle i.
        detached: a name, by which other drivers find the pool, also after this one has ended.
        timeout: seconds to wait for room.

    Raises:
        ExecutionError: the cluster has no room.
        ValueError: this process has joined no cluster, the name is in use, or no pool has it.
    """

    environment: Mapping[str, str] = {}  # variables of its workers

    def __init__(
        self, config: PoolConfig | None, *, share: float = 1.0, detached: str = "", timeout: float = 300.0
    ) -> None:
        if not ray.is_initialized():
            raise ValueError("a pool is on a cluster that this process has joined: call connect() or ray.init() first")
        known = (one for one in placement_group_table().values() if one["state"] != "REMOVED")
        there = [one for one in known if one["name"] == _OURS + detached]
        if bool(there) == (config is not None):
            raise ValueError(f"the cluster has {'a' if there else 'no'} pool {detached!r}")
        if config is None:
            config = PoolConfig(workers=len(there[0]["bundles"]), placement=there[0]["strategy"])
            self.placed = PlacementGroup(PlacementGroupID.from_hex(there[0]["placement_group_id"]))
        else:
            self.placed = _reserved(config, detached, timeout)
        self.config, self.share, self.detached, self.found = config, share, detached, bool(there)
        self.bundles = _bundles_of(self.placed, config)  # of each rank
        self.groups = 0  # that have workers here

    def start(self, worker: Any, rank: int, size: int, name: str = "") -> Any:
        """Start an actor in the bundle of its rank, or find it in a pool that was found; returns its handle."""
        given, known = partial(worker), dict[str, Any]()
        if self.detached:
            known = {"name": f"{name} rank {rank} of {size}", "namespace": _OURS + self.detached}
            if self.found:
                return ray.get_actor(**known)
            known["lifetime"] = "detached"
        actor = ray.remote(
            num_cpus=self.config.cpus * self.share,
            num_gpus=self.config.gpus * self.share,
            max_restarts=0,  # a worker that Ray restarts would have the initial weights
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.placed, self.bundles[rank]),
            runtime_env={"env_vars": dict(self.environment)},
            concurrency_groups=getattr(given.func, "concurrency_groups", None),
            **known,
        )(given.func)
        return actor.remote(*given.args, rank, size, **given.keywords)

    def remove(self) -> None:
        """Give the resources back. Workers that are still there are killed."""
        remove_placement_group(self.placed)

    def __exit__(self, *error: object) -> None:
        if not self.detached:
            self.remove()


def _reserved(config: PoolConfig, detached: str, timeout: float) -> PlacementGroup:
    """Reserve a placement group; an ExecutionError if the cluster has no room."""
    bundle = {"CPU": config.cpus, **({"GPU": config.gpus} if config.gpus else {})}
    known = {"name": _OURS + detached, "lifetime": "detached"} if detached else {}
    group = placement_group([bundle] * config.workers, strategy=config.placement, **known)
    end = time.monotonic() + timeout
    try:
        while not group.wait(min(1.0, timeout)):  # it polls, because Ctrl-C cannot interrupt a wait in Ray
            HEAD.check()
            if time.monotonic() >= min(end, START.get().end):  # Ray raises no error for a group without room
                raise ExecutionError(
                    f"no room for {config.workers} workers of {bundle} ({config.placement}) within {timeout:g} s; the "
                    f"cluster has {ray.cluster_resources()}, of which {ray.available_resources()} are free"
                )
    except BaseException:  # also after Ctrl-C: otherwise Ray could still place the group later
        remove_placement_group(group)
        raise
    START.get().goes_on()
    return group


def _bundles_of(group: Any, config: PoolConfig) -> list[int]:
    """Return the bundle of each rank: ranks of one node have consecutive numbers, if the placement packs.

    Ray fills the nodes one after another, but does not number the bundles in this order. ``ray.shard_over`` and
    ``ray.training_tensor_parallel`` divide the ranks by their numbers.
    """
    bundles = list(range(config.workers))
    if config.placement != "PACK":  # STRICT_PACK has one node, and a user who spreads wants neighbours apart
        return bundles
    nodes = placement_group_table(group)["bundles_to_node_id"]
    order = list(dict.fromkeys(nodes[bundle] for bundle in bundles))
    return sorted(bundles, key=lambda bundle: order.index(nodes[bundle]))
