"""Pools and roles that do not fit are refused before a cluster is asked."""

from typing import Any

import pytest

from rlprims.execution import RayConfig


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"roles": {"critic": "values"}}, r"has the pools \['main', 'values'\], ray.pools \[\]"),
        ({"pools": {"spare": {}}}, r"ray.pools \['spare'\]: expected the same pools"),
        ({"pools": {"main": {}}}, "main only in ray.roles: training_workers and"),
        ({"pools": {"a": {}}, "roles": {"rollout": "a", "reward": "a"}}, "expected only engines in the pool a"),
        ({"training_workers": 4, "shard_over": 3}, "expected a number that divides the 4 ranks of the pool main"),
        (
            {"pools": {"a": {}}, "roles": {"critic": "a"}, "training_workers": 2, "shard_over": 2},
            "the 1 ranks of the pool a",
        ),
        ({"training_workers": 3, "training_tensor_parallel": 2}, "a number that divides the 3 ranks of the pool main"),
        (
            {"training_workers": 6, "shard_over": 3, "training_tensor_parallel": 2},
            "divides the 3 ranks of the pool",
        ),
        ({"colocate": True, "rollout_workers": 2}, "expected as many ranks as engines or more"),
        ({"colocate": True, "pools": {"a": {}}, "roles": {"rollout": "a"}}, "expected as many ranks as engines"),
        ({"weight_transfer": "nccl"}, "expected ranks and engines with whole devices of their own"),
        ({"weight_transfer": "nccl", "gpus_per_worker": 1, "colocate": True}, "use ipc with ray.colocate"),
        ({"weight_transfer": "ipc"}, "expected each engine on the one device of its rank .* got colocate: false"),
        ({"weight_transfer": "ipc", "colocate": True, "engine": "hf"}, "expected ray.engine: vllm, got hf"),
        ({"init": {"address": "auto"}}, "ray.init.address: use ray.address"),
        ({"init": {"runtime_env": {}}}, "ray.init.runtime_env: use ray.runtime_env"),
        ({"init": {"cpus": 2}}, "ray.init.cpus: Ray has no such argument"),
        ({"address": "auto", "init": {"resources": {"a": 1}}}, "ray.init.resources: the cluster of ray.address runs"),
        ({"training_workers": 3, "init": {"num_cpus": 3}}, "ray.init.num_cpus: expected at least 4"),
        ({"gpus_per_worker": 0.5, "init": {"num_gpus": 0}}, "ray.init.num_gpus: expected at least 1"),
        ({"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "4"}}}, "OMP_NUM_THREADS: expected a text, and no name of"),
        ({"runtime_env": {"env_vars": {"NCCL_NTHREADS": 4}}}, "env_vars.NCCL_NTHREADS: expected a text"),
    ],
)
def test_pools_and_roles_need_each_other(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        RayConfig(**settings)


def test_the_short_settings_are_one_pool() -> None:
    short = RayConfig(training_workers=2, rollout_workers=3, gpus_per_worker=0.5, placement="SPREAD")
    (main,) = short.all_pools.values()
    assert (main.workers, main.cpus, main.gpus, main.placement) == (5, 1.0, 0.5, "SPREAD")
    (shared,) = RayConfig(training_workers=2, rollout_workers=2, colocate=True).all_pools.values()
    assert shared.workers == 2
    apart = RayConfig(training_workers=2, pools={"engines": {"workers": 4}}, roles={"rollout": "engines"}).all_pools
    assert {name: pool.workers for name, pool in apart.items()} == {"main": 2, "engines": 4}
