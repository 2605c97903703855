"""Other containers, present or absent."""

import sys

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlprims.data_proto import DataProto
from tests.data_proto.data_proto_batches import make


def test_objects_of_any_kind_through_a_tensordict():
    cells = [None, [1, 2], {"a": 1}, "text", np.ones(2), (3,)]
    data = DataProto.from_dict({"x": torch.arange(6)}, {"o": cells}, {"m": {"k": [1]}})
    back = DataProto.from_tensordict(data.to_tensordict())
    assert [type(cell) for cell in back["o"]] == [type(cell) for cell in cells]
    assert back["o"][1] == [1, 2]
    assert back.meta_info == {"m": {"k": [1]}}


def test_from_tensordict_sorts_by_kind():
    td = TensorDict(
        {
            "x": torch.zeros(2, 3),
            "o": NonTensorStack(NonTensorData("a"), NonTensorData("b")),
            "m": NonTensorData("all", batch_size=[2]),
        },
        batch_size=[2],
    )
    data = DataProto.from_tensordict(td, meta_info={"step": 1})
    assert list(data.batch.keys()) == ["x"]
    assert data["o"].tolist() == ["a", "b"]
    assert data.meta_info == {"step": 1, "m": "all"}
    assert set(td.keys()) == {"x", "o", "m"}
    with pytest.raises(ValueError, match="both the TensorDict and meta_info have 'm'"):
        DataProto.from_tensordict(td, meta_info={"m": 1})
    with pytest.raises(ValueError, match="batch_size"):
        DataProto.from_tensordict(TensorDict({}, batch_size=[2, 3]))
    with pytest.raises(ValueError, match="flatten_keys"):
        DataProto.from_tensordict(TensorDict({"n": TensorDict({"x": torch.zeros(2)}, [2])}, [2]))


def test_to_tensordict_needs_distinct_names():
    data = DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"x": 1})
    with pytest.raises(ValueError, match=r"\['x'\]"):
        data.to_tensordict()


@pytest.mark.parametrize(("package", "method"), [("pandas", "to_pandas"), ("pyarrow", "to_arrow")])
def test_absent_packages_are_named(monkeypatch, package, method):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        getattr(make(2), method)()
