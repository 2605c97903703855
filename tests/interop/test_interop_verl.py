"""The bridge to verl's container, with a stand-in for verl; tests/peers crosses it to the real one."""

import subprocess
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlprims.data_proto import BatchError, DataProto
from rlprims.interop.verl import from_verl, to_verl


@dataclass
class Theirs:
    batch: Any = None
    non_tensor_batch: Any = field(default_factory=dict)
    meta_info: Any = field(default_factory=dict)


@pytest.fixture(autouse=True)
def verl(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.protocol", types.SimpleNamespace(DataProto=Theirs))


@pytest.fixture
def data():
    jagged = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.jagged)
    return DataProto.from_dict(
        {"ids": torch.arange(4).view(2, 2), "tokens": jagged},
        {"uid": [["a"], None], "score": np.array([0.5, 1.0])},
        {"step": 1, "notes": {"tags": ["x"]}},
    )


@pytest.mark.parametrize("there", [to_verl, lambda data: from_verl(to_verl(data))])
def test_tensors_are_shared_and_nothing_else(data, there):
    result = there(data)
    assert result.batch["ids"] is data.batch["ids"]
    assert result.batch["tokens"] is data.batch["tokens"]
    assert result.non_tensor_batch["uid"][0] is data.non_tensor_batch["uid"][0]
    assert result.non_tensor_batch["score"].dtype == np.float64

    result.batch["new"] = torch.zeros(2)
    result.non_tensor_batch["uid"][1] = "changed"
    result.non_tensor_batch["new"] = np.zeros(2)
    result.meta_info["notes"]["tags"].append("y")
    result.meta_info["new"] = 1
    assert set(data.batch.keys()) == {"ids", "tokens"}
    assert data["uid"].tolist() == [["a"], None]
    assert set(data.non_tensor_batch) == {"uid", "score"}
    assert data.meta_info == {"step": 1, "notes": {"tags": ["x"]}}


def test_from_verl_shares_no_columns_with_the_original(data):
    theirs = to_verl(data)
    ours = from_verl(theirs)
    ours["new"] = torch.zeros(2)
    ours["uid"][1] = "changed"
    ours["notes"]["tags"].append("y")
    assert set(theirs.batch.keys()) == {"ids", "tokens"}
    assert theirs.non_tensor_batch["uid"].tolist() == [["a"], None]
    assert theirs.meta_info == {"step": 1, "notes": {"tags": ["x"]}}


@pytest.mark.parametrize(
    "data",
    [
        DataProto(),
        DataProto(meta_info={"step": 1}),
        DataProto.from_dict(non_tensors={"uid": ["a", "b"]}),
        DataProto.from_dict({"ids": torch.zeros(0, 3)}, {"uid": []}),
        DataProto(TensorDict({}, batch_size=[3])),
    ],
    ids=["nothing", "metadata", "objects", "no_rows", "no_fields"],
)
def test_parts_that_are_absent_or_empty(data):
    theirs = to_verl(data)
    back = from_verl(theirs)
    assert (theirs.batch is None) == (back.batch is None) == (data.batch is None)
    assert len(back) == len(data)
    assert set(back.non_tensor_batch) == set(data.non_tensor_batch)
    assert back.meta_info == data.meta_info


def test_parts_that_are_none():
    assert len(from_verl(Theirs(None, None, None))) == 0


def test_from_verl_refuses_broken_containers(data):
    with pytest.raises(BatchError, match=r"dict has no batch, non_tensor_batch, meta_info"):
        from_verl({})
    with pytest.raises(BatchError, match="different numbers of rows"):
        from_verl(Theirs(non_tensor_batch={"a": np.zeros(2), "b": np.zeros(3)}))
    with pytest.raises(BatchError, match=r"both have \[a\]"):
        from_verl(Theirs(TensorDict({"a": torch.zeros(2)}, [2]), {"a": np.zeros(2)}))
    data.non_tensor_batch["uid"] = np.array(["a"], dtype=object)
    with pytest.raises(BatchError, match="different numbers of rows"):
        to_verl(data)


def test_verl_absent(monkeypatch, data):
    theirs = to_verl(data)
    monkeypatch.setitem(sys.modules, "verl.protocol", None)
    with pytest.raises(ImportError, match=r"to_verl needs verl .*: pip install verl"):
        to_verl(data)
    assert len(from_verl(theirs)) == 2


@pytest.mark.slow
def test_the_import_brings_neither_verl_nor_ray():
    code = "import sys, rlprims.interop.verl; sys.exit(bool({'verl', 'ray'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)
