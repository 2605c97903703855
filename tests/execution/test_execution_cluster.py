"""Which cluster a run is on: the one that is named, or its own; and what it says where there is none."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlprims.execution import ModelConfig

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]

_NO_CLUSTER = """
import os, socket, sys
import ray
from rlprims.execution import ExecutionError
from rlprims.execution.ray._cluster import connect
def said(address, **options):
    try:
        connect(address, cpus=2, **options)
    except ExecutionError as error:
        return str(error)
    ray.shutdown()  # another test's cluster is "auto"
nobody = socket.socket()
nobody.bind(("", 0))
dead = "%s:%d" % (ray.util.get_node_ip_address(), nobody.getsockname()[1])
print(said(dead).replace(dead, "DEAD"))
os.environ["RAY_ADDRESS"] = dead
print(said(None).replace(dead, "DEAD"))
del os.environ["RAY_ADDRESS"]
print(said("auto"))
print(said("http://127.0.0.1:8265"))
nobody.listen()
print(said(dead, timeout=2.0).replace(dead, "DEAD"))
sys.stdout.flush()
os._exit(0)  # Ray alone still tries
"""
_OWN_CLUSTER = """
from rlprims.execution.ray._cluster import connect
said = []
connect(None, cpus=2, say=said.append)
import ray
assert ray.get(ray.remote(lambda: 5).remote()) == 5
print(*said)
"""
_WITH_A_TOKEN = """
import os
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "7" * 64}
from rlprims.execution.ray._cluster import connect
connect(None, cpus=2)
import ray
print(ray.get_runtime_context().gcs_address, flush=True)
input()
"""
_WITHOUT_ONE = """
import sys
from rlprims.execution import ExecutionError
from rlprims.execution.ray._cluster import connect
for address in sys.argv[1:]:
    try:
        connect(address, cpus=2)
    except ExecutionError as error:
        print(error)
"""
_NODES = """
import ray
from contextlib import ExitStack
from ray.cluster_utils import Cluster
from rlprims.execution import ModelConfig, RayConfig
from rlprims.execution.ray._start import reserve_pools
class Rank:
    def __init__(self, rank, size): ...
    def node(self):
        return ray.get_runtime_context().get_node_id()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 9})
for _ in range(2):
    cluster.add_node(num_cpus=9)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
with ExitStack() as held:
    config = RayConfig(training_workers=26, rollout_workers=1, start_timeout=60.0)
    place = reserve_pools(config, ModelConfig(path="none", device="cpu"), held)["main"]
    ranks = {rank: place.start(Rank, rank, 27) for rank in (0, 8, 9, 17, 18, 26)}
    print(*ray.get([worker.node.remote() for worker in ranks.values()]))
"""


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: ...",
            "its process was killed or crashed: out of memory, signal 9, or a fault in native code",
        ),
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a SIGTERM.",
            "Worker exits with an exit code 1. The process receives a SIGTERM",
        ),
        ("The actor is dead because it was killed by `ray.kill`.", "it was killed by `ray.kill`"),
        ("The actor died because of an error raised in its creation task\nValueError: no", "ValueError: no"),
    ],
)
def test_the_death_of_a_worker_is_told_in_a_few_words(words: str, reason: str) -> None:
    from rlprims.execution.ray._calls import reason_of

    assert reason_of(f"The actor died unexpectedly before finishing this task.\n\tpid: 7\n{words}\n") == reason


def python(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", script, *arguments], subprocess.PIPE
    pipes = {"stdin": pipe, "stdout": pipe, "stderr": pipe}
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}  # of another test
    return subprocess.Popen(command, cwd=ROOT, env=plain | environment, text=True, **pipes)


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose name leaves room for those of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def test_an_address_without_a_cluster_is_told_in_a_line(short: Path) -> None:
    """Ray itself tries a dead one for a quarter of an hour."""
    token_of_another_test = os.environ | {"RAY_TMPDIR": str(short)}
    told = python(_NO_CLUSTER, **token_of_another_test).communicate(timeout=400)[0].splitlines()
    assert len(told) == 5, told
    nobody_there = "DEAD: no Ray cluster is there ([Errno 111] Connection refused); start one there by 'ray start"
    assert [line.partition(nobody_there)[0] for line in told[:2]] == ["ray.address=", "RAY_ADDRESS="]
    assert told[3].startswith("ray.address=http://127.0.0.1:8265: Invalid Ray address")
    assert told[4].startswith("ray.address=DEAD: no answer from Ray within 2 s; start one there by 'ray start --head'")
    auto = ("Could not find any", "the cluster at 127.0.0.1:")  # of another test
    assert told[2] == "None" or told[2].removeprefix("ray.address=auto: ").startswith(auto)


def test_a_cluster_that_is_not_for_others_says_what_joins_it(short: Path) -> None:
    """And somebody's own cluster, on loopback, that it is on loopback: within seconds, and Ray itself would try on."""
    alone = {"HOME": str(short), "RAY_TMPDIR": str(short)}
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    cluster = python(_WITH_A_TOKEN, **alone, **loopback)
    assert cluster.stdout is not None
    try:
        address = cluster.stdout.readline().strip()
        both = [python(_WITHOUT_ONE, address, **alone, **loopback), python(_WITHOUT_ONE, address, "auto", **alone)]
        (no_token,), (named, found) = (each.communicate(timeout=400)[0].splitlines() for each in both)
    finally:
        cluster.communicate("\n", timeout=60)
    assert "set RAY_AUTH_MODE=token" in no_token
    assert f"={address}: the cluster at {address} is on loopback only: to join it, set RAY_ENABLE_WINDOWS" in named
    assert "=auto: the cluster at 127.0.0.1:" in found  # another test's, or this one


@pytest.mark.parametrize(
    "mode",
    [{}, pytest.param({"RAY_AUTH_MODE": "token"}, marks=pytest.mark.release)],
    ids=["", "started by a program that uses Ray"],
)
def test_a_run_without_an_address_has_a_cluster_of_its_own(short: Path, mode: dict[str, str]) -> None:
    """Whatever the address file says, which a cluster that is gone has left; and nothing is written into the home."""
    home, temporary = short / "home", short / "t"
    for directory in (home, temporary / "ray"):
        directory.mkdir(parents=True)
    (temporary / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    beside = {"HOME": str(home), "RAY_TMPDIR": str(temporary), **mode}
    told, errors = python(_OWN_CLUSTER, **beside).communicate(timeout=400)
    assert told == "ray: starting a cluster on this machine\n", errors
    assert errors == ""
    assert list(home.iterdir()) == []


def test_ranks_of_a_node_have_consecutive_numbers(short: Path) -> None:
    """Three nodes of nine: Ray numbers the bundles of such a placement group in another order."""
    told, errors = python(_NODES, HOME=str(short), RAY_TMPDIR=str(short)).communicate(timeout=400)
    first, last = told.split()[::2], told.split()[1::2]
    assert first == last, errors
    assert len(set(first)) == 3


def test_models_are_found_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a cluster that was joined need not have that of the run."""
    from rlprims.execution.ray._checks import with_whole_paths

    monkeypatch.chdir(tmp_path)
    for name in ("here", "taught"):
        (tmp_path / name).mkdir()
    model = ModelConfig(
        path="here", reference="of/a-hub", critic="./here", teacher={"sums": "taught", "of": "of/a-hub"}
    )
    whole = with_whole_paths(model)
    assert (whole.path, whole.critic) == (str(tmp_path / "here"), str(tmp_path / "here"))
    assert (whole.reference, whole.reward) == ("of/a-hub", None)
    assert whole.teacher == {"sums": str(tmp_path / "taught"), "of": "of/a-hub"}
    assert with_whole_paths(whole) == whole


def test_ranks_on_gpus_name_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL itself needs a GPU; a Ray worker sees its own as the first."""
    from rlprims.execution.ray._fsdp import join

    joined: list[Any] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **how: joined.append((backend, how)))
    for device in ("cuda", "cpu"):
        listener = socket.create_server(("127.0.0.1", 0))
        join(0, 1, listener.getsockname(), listener, device=device, timeout=10.0)
    (_, cuda), (_, cpu) = joined
    assert cuda["device_id"] == torch.device("cuda", 0)
    assert cpu["device_id"] is None


def test_workers_get_the_drivers_settings_of_nccl_but_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlprims.execution.ray._cluster import environment_of_workers

    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HF_HOME", "EDITOR"):
        monkeypatch.setenv(name, "some")
    found = environment_of_workers(on_cpu=True)
    assert found["NCCL_SOCKET_IFNAME"] == found["GLOO_SOCKET_IFNAME"] == found["HF_HOME"] == "some"
    assert not {"CUDA_VISIBLE_DEVICES", "HF_TOKEN", "EDITOR"} & found.keys()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert environment_of_workers(on_cpu=True)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in environment_of_workers(on_cpu=False)
