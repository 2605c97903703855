"""A batch between processes: what is copied, and what stays."""

import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlprims.data_proto import DataProto
from tests.data_proto.data_proto_batches import make, rows_of


def out_of_band(data):
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(data, protocol=5, buffer_callback=buffers.append), buffers


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_round_trip(protocol):
    data = make(5)
    stream = pickle.dumps(data, protocol=protocol)
    back = pickle.loads(stream)  # noqa: S301
    assert rows_of(back) == rows_of(data) == rows_of(make(5))
    assert back.meta_info == data.meta_info
    back["ids"][0] = 9  # memory of its own, and not read-only
    assert rows_of(data) == rows_of(make(5))


def test_out_of_band_copies_nothing():
    data = DataProto.from_dict({"x": torch.arange(50_000), "y": torch.ones(50_000, 2, dtype=torch.bfloat16)})
    stream, buffers = out_of_band(data)
    assert len(stream) < 1000
    assert sorted(memoryview(buffer).nbytes for buffer in buffers) == [200_000, 400_000]
    back = pickle.loads(stream, buffers=buffers)  # noqa: S301
    assert back["x"].data_ptr() == data["x"].data_ptr()
    assert torch.equal(back["y"], data["y"])


def test_read_only_buffers_are_copied_so_that_writes_are_safe():
    data = make(4)
    stream, buffers = out_of_band(data)
    back = pickle.loads(stream, buffers=[bytes(buffer.raw()) for buffer in buffers])  # noqa: S301
    back["ids"][0] = 7
    back["score"][0] = 7
    assert back["ids"][0].tolist() == [7, 7]
    assert back["score"][0] == 7
    assert rows_of(data) == rows_of(make(4))


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_chunk_takes_only_its_own_rows_along(protocol):
    data = DataProto.from_dict({"x": torch.zeros(1000, 100)})
    assert len(pickle.dumps(data[:10], protocol=protocol)) < 10_000


def test_any_tensor_round_trips():
    tensors = {
        "bf16": torch.ones(2, 3, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "fp8": torch.ones(2).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1j, 2.0]),
        "conjugate": torch.tensor([1j, 2.0]).conj(),
        "strided": torch.arange(12).view(2, 6)[:, ::2],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
        "empty": torch.zeros(2, 0),
        "graph": torch.ones(2, requires_grad=True) * 2,
    }
    for protocol in (4, 5):
        back = pickle.loads(pickle.dumps(DataProto.from_dict(tensors), protocol))  # noqa: S301
        for name, tensor in tensors.items():
            assert back[name].dtype == tensor.dtype
            assert back[name].tolist() == tensor.tolist()


def test_an_empty_array_of_numpy_round_trips():
    """Its stride is 0."""
    batch = DataProto.from_dict({"ids": torch.from_numpy(np.zeros(0, np.int32))})
    for protocol in (4, 5):
        assert pickle.loads(pickle.dumps(batch, protocol))["ids"].dtype == torch.int32  # noqa: S301


def test_subclasses_and_devices_stay():
    batch = TensorDict({"x": torch.zeros(2)}, batch_size=[2], device="cpu")
    back = pickle.loads(pickle.dumps(Mine(batch), 5))  # noqa: S301
    assert type(back) is Mine
    assert back.batch.device == torch.device("cpu")
    assert pickle.loads(pickle.dumps(Mine(meta_info={"a": 1}), 5)).batch is None  # noqa: S301


class Mine(DataProto):
    pass


def _double(data):
    data["ids"] = data["ids"] * 2
    return data


@pytest.mark.slow
def test_through_a_real_process():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        back = pool.apply(_double, (make(4),))
    assert back["ids"].tolist() == (make(4)["ids"] * 2).tolist()
    assert isinstance(back["image"][1], np.ndarray)
