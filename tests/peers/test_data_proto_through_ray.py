"""Through Ray's own object store and a real actor: what arrives, what may be written, and how often it was copied."""

import gc
import sys

import numpy as np
import pytest
import ray
import torch

from rlprims.interop.verl import DataProto
from tests.data_proto.data_proto_batches import make, rows_of

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
MIB = 2**20
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the only way to listen on the loopback interface alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # else a full machine, whoever filled it, ends these actors
}


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        ray.init(
            address="local",  # whatever cluster the machine has
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=512 * MIB,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def actor(cluster):
    class Worker:  # in a function, so that Ray sends it along: workers cannot import tests
        def same(self, data):
            return data

        def scored(self, data):
            data["ids"][:] += 1  # in place, in memory that came from the store
            data["score"] *= 2
            data["new"] = data["logp"] * 2
            return data

        def refused(self, data):
            try:
                data["image"][1][:] = 0
            except ValueError as error:
                return str(error)

    return ray.remote(Worker).remote()


def get(reference):
    return ray.get(reference, timeout=120)


def large(rows=4):
    """Arrays of more than 100 KiB: below that Ray sends no buffers but bytes."""
    data = make(rows)
    data["ids"] = torch.arange(rows * 50_000).view(rows, 50_000)
    data["score"] = np.arange(rows * 50_000.0).reshape(rows, 50_000)
    data.non_tensor_batch["image"] = np.fromiter((np.full((200, 200), row) for row in range(rows)), object, rows)
    return data


@pytest.mark.parametrize(
    "data",
    [
        lambda: make(5),
        lambda: make(0),
        lambda: large()[1:3],
        lambda: large()[[3, 0]],
        lambda: DataProto(),
        lambda: DataProto(meta_info={"step": 1}),
        lambda: DataProto.from_dict(non_tensors={"uid": ["a"]}),
        lambda: DataProto.from_dict({"x": (torch.ones(70_000, requires_grad=True) * 2).bfloat16()}),
    ],
    ids=["small", "no_rows", "slice", "gathered", "nothing", "metadata", "objects", "bf16"],
)
def test_data_proto_arrives_whole_through_ray(actor, data):
    data = data()
    for back in (get(ray.put(data)), get(actor.same.remote(data))):
        assert type(back) is DataProto
        assert rows_of(back) == rows_of(data)
        assert back.meta_info == data.meta_info
        assert {n: c.dtype for n, c in back.non_tensor_batch.items()} == {
            n: c.dtype for n, c in data.non_tensor_batch.items()
        }
        if data.batch is not None:
            assert {n: t.dtype for n, t in back.batch.items()} == {n: t.dtype for n, t in data.batch.items()}
        back.check_consistency()


def test_columns_that_arrive_may_be_written_and_the_store_keeps_its_own(actor):
    data = large()
    stored = ray.put(data)
    back = get(stored)
    for name in ("ids", "logp", "score"):
        back[name][:] = -1
    back["tokens"].values().fill_(-1)
    back["uid"][:] = None
    assert rows_of(get(stored)) == rows_of(data) == rows_of(large())

    scored = get(actor.scored.remote(stored))
    assert torch.equal(scored["ids"], data["ids"] + 1)
    assert np.array_equal(scored["score"], data["score"] * 2)
    assert torch.equal(scored["new"], data["logp"] * 2)
    assert rows_of(get(stored)) == rows_of(large())


def test_arrays_in_cells_are_the_stores_and_refuse_writes(actor):
    data = large()
    assert "read-only" in get(actor.refused.remote(data))
    back = get(ray.put(data))
    with pytest.raises(ValueError, match="read-only"):
        back["image"][1][:] = 0
    back["image"][1] = back["image"][1].copy()
    back["image"][1][:] = 0
    assert back["image"][1].sum() == 0


def test_parts_of_workers_are_joined(actor):
    data = large(6)
    parts = [actor.same.remote(part) for part in data.chunk(4, pad=True)]
    assert rows_of(DataProto.concat([get(part) for part in parts]).unpad(2)) == rows_of(data)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_tensor_is_copied_once_on_each_side(cluster):
    data = DataProto.from_dict(
        {"x": torch.ones(8, 8 * MIB // 4), "y": torch.ones(8 * MIB, dtype=torch.bfloat16).view(8, -1)}
    )
    size = sum(tensor.nbytes for tensor in data.batch.values()) / MIB
    get(ray.put(data))  # what Ray makes once
    reference, risen = peak(lambda: ray.put(data))
    assert risen < size * 1.3  # the store's own, and nothing between
    back, risen = peak(lambda: get(reference))
    assert risen < size * 1.3  # memory that may be written
    assert torch.equal(back["x"], data["x"])


def peak(function):
    """The answer, and by how many MiB resident memory, mapped from the store or not, rose meanwhile."""

    def resident(which):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(which)) / 1024

    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = resident("VmRSS")
    answer = function()
    return answer, resident("VmHWM") - before
