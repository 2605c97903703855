"""A start of a cluster that fails, in time and with nothing left behind; and the end of one that nobody holds."""

import gc
import math
import os
import signal
import threading
import time

import pytest

from rlprims import algorithms
from rlprims.execution import ExecutionError
from tests.execution.execution_contract import cluster
from tests.execution.test_execution_ray import process_of, tied

pytestmark = pytest.mark.ray
GRPO = algorithms.grpo()
PPO = algorithms.ppo()

__all__ = ["tied"]  # the fixture


class TestAStartThatFails:
    """It gives back what it had, at whatever it fails."""

    @pytest.fixture(autouse=True)
    def nothing_stays(self):
        from ray.util import placement_group_table

        from rlprims.execution.ray._cluster import connect

        connect(None, cpus=64)
        before = placement_group_table().keys()
        yield
        states = {group: entry["state"] for group, entry in placement_group_table().items() if group not in before}
        assert states
        assert set(states.values()) == {"REMOVED"}

    def test_at_a_rank(self, tied):
        with pytest.raises(ExecutionError, match=r"training rank 0 of 1: .*nowhere"):
            cluster(tied, PPO, critic="/nowhere")

    def test_at_an_engine(self, tied):
        with pytest.raises(ExecutionError, match=r"rollout worker 0 of 1: .*") as raised:
            cluster(tied, GRPO, engine="vllm", cluster={"kv_cache_bytes": 1})
        assert "\n" not in str(raised.value)

    def test_at_the_second_pool(self, tied):
        pools = {"values": {"cpus": 1000.0}}
        with pytest.raises(
            ExecutionError, match=r"no room for 1 workers of {'CPU': 1000.0} .* within 3 s; the cluster"
        ):
            cluster(tied, PPO, cluster={"pools": pools, "roles": {"critic": "values"}, "start_timeout": 3.0})

    def test_at_who_is_tired_of_waiting(self, tied):
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            cluster(tied, GRPO, cluster={"cpus_per_worker": 1000.0, "start_timeout": 240.0})
        assert time.monotonic() - begun < 120


def test_a_start_has_one_limit_for_all_that_it_waits_for(tied):
    """Each wait may take longer, and nothing answers."""
    import ray

    from rlprims.execution.ray._calls import fetch
    from rlprims.execution.ray._cluster import connect
    from rlprims.execution.ray._head import start

    connect(None, cpus=64)
    never = ray.remote(lambda: 1).options(num_cpus=1000.0).remote()
    begun = time.monotonic()

    def waits():
        with pytest.raises(ExecutionError, match=r"rank 2 did not answer within 1 s"):
            fetch(never, "rank 2", 1.0)
        fetch(never, "rank 3", 240.0)

    with pytest.raises(ExecutionError, match=r"no answer from rank 3: nothing went on for ray.start_timeout=4 s"):
        start(waits, 4.0, begun)
    assert 4.0 <= time.monotonic() - begun < 60


def test_a_start_goes_on_while_a_worker_works():
    """For longer than ``start_timeout``; one that only sleeps ends it, and the message says where it sleeps."""
    import ray

    from rlprims.execution.ray._calls import fetch
    from rlprims.execution.ray._cluster import connect
    from rlprims.execution.ray._head import reports_work, start

    class Worker:
        def ping(self):
            pass

        def build(self, works, seconds):
            with reports_work():
                for _ in range(seconds):
                    end = time.monotonic() + 1
                    while works and time.monotonic() < end:
                        pass
                    time.sleep(max(0.0, end - time.monotonic()))
            return "built"

    connect(None, cpus=64)
    worker = ray.remote(Worker).remote()
    ray.get(worker.ping.remote())
    build = lambda *how: fetch(worker.build.remote(*how), "rank 1", math.inf)  # noqa: E731
    assert start(lambda: build(True, 10), 6.0, time.monotonic()) == "built"
    with pytest.raises(
        ExecutionError, match=r"rank 1: nothing went on for .*=6 s; process .* is in .*Worker.build of .*start"
    ):
        start(lambda: build(False, 60), 6.0, time.monotonic())
    ray.kill(worker)


@pytest.mark.release
def test_a_cluster_that_nobody_holds_gives_its_processes_back(tied):
    execution = cluster(tied, GRPO)
    processes = [process_of(worker) for worker in (*execution.trainers.workers, *execution.rollouts.workers)]
    del execution
    gc.collect()
    for _ in range(300):
        if not any(os.path.exists(f"/proc/{process}") for process in processes):
            return
        time.sleep(0.1)
    pytest.fail("its workers live on")


def test_a_cluster_without_room_says_so(tied):
    with pytest.raises(ExecutionError, match=r"no room for 2 workers of .* within 1 s; the cluster has"):
        cluster(tied, GRPO, cluster={"cpus_per_worker": 1000.0, "start_timeout": 1.0})
