"""Worker groups of a user's own classes: what docs/controller.md says of them."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose name leaves room for those of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def python(short: Path, *arguments: str, cwd: Path = ROOT) -> str:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}  # of another test
    own = {"RAY_TMPDIR": str(short), "HOME": str(short), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    own |= {"PYTHONPATH": str(ROOT), "RAY_prestart_worker_first_driver": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    ran = subprocess.run([sys.executable, *arguments], cwd=cwd, env=plain | own, text=True, capture_output=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    return ran.stdout


def test_the_page_runs(short: Path) -> None:
    python(short, "-m", "doctest", "-o", "ELLIPSIS", "-o", "IGNORE_EXCEPTION_DETAIL", "docs/controller.md")


REFUSED = """
import sys
import torch
from rlprims.data_proto import DataProto
from rlprims.execution import PoolConfig
from rlprims.execution.ray import Pool, WorkerGroup, WorkerLost, connect, dispatch

class Worker:
    def __init__(self, rank, size):
        self.rows = []
    @dispatch("split")
    def rows_of(self, batch):
        return batch
    @dispatch("split")
    def one(self, batch):
        return torch.zeros(1)
    @dispatch("split", together="group_ids")
    def grouped(self, batch):
        return batch
    @dispatch("everywhere", collect=tuple)
    def lives(self):
        return True
    @dispatch(lambda parts, x: [(x,)])
    def too_few(self, x):
        return x
    @dispatch("first")
    def ends(self):
        import os
        os._exit(3)
    def plain(self):
        return 1

class Bare: ...

class Slow(Worker):
    @dispatch("everywhere")
    async def awaited(self):
        return "awaited"

def say(*words):
    sys.stdout.write("said: " + " ".join(map(str, words)) + chr(10))  # at once: Ray's log lines come from a thread

def refused(function, *args, **how):
    try:
        function(*args, **how)
    except (ValueError, TypeError, WorkerLost) as error:
        say(type(error).__name__, error)
    else:
        say("not refused")

refused(Pool, PoolConfig())
refused(dispatch, "somewhere")
refused(dispatch, "first", together="group_ids")
refused(connect, runtime_env={"py_module": ["mine"]})
connect(cpus=3)
rows = DataProto.from_dict({"x": torch.arange(5.0)})
refused(Pool, None, detached="nobody")
with Pool(PoolConfig(workers=2), share=0.5) as pool:
    refused(WorkerGroup, Worker, pool, size=3)
    refused(WorkerGroup, Worker, pool, same_rows=3)
    refused(WorkerGroup, Bare, pool)
    group = WorkerGroup(Worker, pool)
    refused(group.call, Worker.plain)
    refused(group.call, Worker.rows_of, [1, 2])
    refused(group.call, Worker.grouped, rows)
    refused(group.call, Worker.lives, together="x")
    refused(group.call, Worker.too_few, 1)
    refused(group.call(Worker.one, rows).result)
    say(group.call(Worker.rows_of, rows).result()["x"].tolist(), len(group.call(Worker.rows_of, rows[:0]).result()))
    say(group.call(Worker.rows_of, rows[4:]).result()["x"].tolist(), group.call(Worker.lives).result())
    other = WorkerGroup({"a": Worker, "b": Slow}, pool, same_rows=2)
    refused(WorkerGroup, Worker, pool)
    refused(other.call, Worker.lives)
    say(other.role("b").call(Slow.awaited).result(), len(other.role("a").call(Worker.rows_of, rows).result()))
    refused(group.call(Worker.ends).result)
"""


def test_what_cannot_be_is_refused_in_a_line(short: Path) -> None:
    told = re.findall("said: (.*)", python(short, "-c", REFUSED))
    expected = [
        "ValueError a pool is on a cluster that this process has joined",
        "ValueError dispatch: expected everywhere, first, split or a function, got 'somewhere'",
        "ValueError dispatch: columns, together and share_prompts are of 'split'",
        "ValueError ray.runtime_env.py_module: Ray has no such field",
        "ValueError the cluster has no pool 'nobody'",
        "ValueError Worker: 2 bundles for 3 workers",
        "ValueError Worker: 2 bundles for 2 workers, 3 to a part",
        "TypeError too many positional arguments",
        "ValueError Worker: no method plain has @dispatch",
        "ValueError expected a DataProto to split, got list",
        "ValueError expected a tensor of ids group_ids in the batch",
        "ValueError Worker: lives splits no batch",
        "ValueError Worker: too_few: expected 2 parts from its split, got 1",
        "ValueError expected results for parts of [3, 2] rows, got [1, 1]",
        "[0.0, 1.0, 2.0, 3.0, 4.0] 0",
        "[4.0] (True, True)",
        "ValueError Worker: the pool is taken",
        "ValueError a_b: no method lives has @dispatch; of several roles",
        "['awaited', 'awaited'] 5",
        "WorkerLost Worker rank 0 of 1 died",
    ]
    assert len(told) == len(expected), "\n".join(told)
    assert [line[: len(start)] for line, start in zip(told, expected, strict=True)] == expected


NODES = """
import time
from collections import Counter
import ray
from ray.cluster_utils import Cluster
from rlprims.execution import ExecutionError, PoolConfig
from rlprims.execution.ray import Pool, connect
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
connect(cluster.address)

class Rank:
    def __init__(self, rank, size): ...
    def node(self):
        return ray.get_runtime_context().get_node_id()

for placement, workers in PLACEMENTS:
    while ray.available_resources().get("CPU", 0) < 6:  # of the pool before
        time.sleep(0.1)
    try:
        with Pool(PoolConfig(workers=workers, placement=placement), timeout=5.0) as pool:
            nodes = ray.get([worker.node.remote() for worker in [pool.start(Rank, i, workers) for i in range(workers)]])
        print(placement, sorted(Counter(nodes).values()), nodes == sorted(nodes, key=nodes.index))
    except ExecutionError as error:
        print(placement, str(error).partition(" within")[0])
"""
PLACEMENTS = {
    ("PACK", 4): "PACK [2, 2] True",
    ("SPREAD", 3): "SPREAD [1, 1, 1] True",
    ("SPREAD", 4): "SPREAD [1, 1, 2]",
    ("STRICT_PACK", 2): "STRICT_PACK [2] True",
    ("STRICT_PACK", 3): "STRICT_PACK no room for 3 workers of {'CPU': 1.0} (STRICT_PACK)",
    ("STRICT_SPREAD", 3): "STRICT_SPREAD [1, 1, 1] True",
    ("STRICT_SPREAD", 4): "STRICT_SPREAD no room for 4 workers of {'CPU': 1.0} (STRICT_SPREAD)",
}


def test_each_strategy_places_a_pool_as_it_says(short: Path) -> None:
    """On three raylets of this machine, with two CPUs each."""
    told = python(short, "-c", f"PLACEMENTS = {list(PLACEMENTS)}\n{NODES}").splitlines()
    assert len(told) == len(PLACEMENTS), told
    assert [line[: len(start)] for line, start in zip(told, PLACEMENTS.values(), strict=True)] == [*PLACEMENTS.values()]


COUNTER = """
import sys
from rlprims.execution import PoolConfig
from rlprims.execution.ray import Pool, WorkerGroup, connect, dispatch

class Counter:
    def __init__(self, rank, size):
        self.calls = 0
    @dispatch("everywhere")
    def count(self):
        self.calls += 1
        return self.calls

def first():
    pool = Pool(PoolConfig(workers=2, placement="SPREAD"), detached="kept")
    print(WorkerGroup(Counter, pool, name="counters").call(Counter.count).result())

def second():
    pool = Pool(None, detached="kept")
    print(WorkerGroup(Counter, pool, name="counters").call(Counter.count).result())
    pool.remove()

if __name__ == "__main__":
    connect(sys.argv[1])
    {"first": first, "second": second}[sys.argv[2]]()
"""
DRIVERS = """
import subprocess, sys
import ray
from ray.cluster_utils import Cluster
from rlprims.execution.ray import Pool, connect
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
node = cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
for driver in ("first", "second"):
    command = [sys.executable, "counter.py", cluster.address, driver]
    print(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout, end="")
connect(cluster.address, namespace="mine", runtime_env={"env_vars": {"WHOSE": "mine"}, "working_dir": "."})
try:
    Pool(None, detached="kept")
except ValueError as error:
    print(error)

@ray.remote(num_cpus=0.5)
def controller():
    import os
    from counter import Counter
    from rlprims.execution import PoolConfig
    from rlprims.execution.ray import Pool, WorkerGroup
    with Pool(PoolConfig(workers=1)) as pool:
        counted = WorkerGroup(Counter, pool).call(Counter.count).result()
    here = ray.get_runtime_context()
    return here.get_node_id(), here.namespace, os.environ["WHOSE"], counted

where, *told = ray.get(controller.remote())
print(where == node.node_id, *told)
"""


def test_workers_outlive_their_driver_and_a_driver_may_be_away_from_the_head(short: Path) -> None:
    """A second driver finds the workers with what they hold; a third, a task, runs on another node than the head."""
    code = short / "code"  # it is sent to the workers: not with Ray's own files
    code.mkdir()
    (code / "counter.py").write_text(COUNTER)
    told = python(short, "-c", DRIVERS, cwd=code).splitlines()
    assert told == ["[1, 1]", "[2, 2]", "the cluster has no pool 'kept'", "True mine mine [1]"]
