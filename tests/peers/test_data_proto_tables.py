"""Tables for reading: what pandas and pyarrow themselves make of a batch."""

import math

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from pyarrow import parquet

from rlprims.data_proto import DataProto
from tests.data_proto.data_proto_batches import jagged, make, rows_of

pytestmark = pytest.mark.peers
DTYPES = [*(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32)]
DTYPES += [torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]


def read(table):
    return table.to_pylist() if isinstance(table, pyarrow.Table) else table.to_dict("records")


@pytest.fixture(params=["to_pandas", "to_arrow"])
def table_of(request):
    return lambda data: getattr(data, request.param)()


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_table_says_what_the_rows_say(table_of, rows):
    data = make(rows)
    table = table_of(data)
    assert list(table.columns if isinstance(table, pandas.DataFrame) else table.column_names) == [
        *("ids", "logp", "tokens", "uid", "score", "image")
    ]
    assert len(table) == rows
    assert read(table) == rows_of(data)


def test_rows_that_are_cut_reversed_or_in_a_graph(table_of):
    data = make(7)
    data["grad"] = torch.ones(7, requires_grad=True) * 2
    data["strided"] = torch.arange(42).view(7, 6)[:, ::2]
    data["conjugate"] = torch.view_as_real(torch.arange(7) * 1j)[:, 1]
    for part in (data[2:5], data[::-1], data[:0]):
        assert read(table_of(part)) == rows_of(part)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_keep_their_dtype(dtype):
    tensor = torch.tensor([0.0, 1.0, 2.0]).to(dtype)
    as_numpy = tensor.float().numpy() if dtype in (torch.bfloat16, torch.float8_e4m3fn) else tensor.numpy()
    for rows in (0, 3):
        data = DataProto.from_dict(
            {"one": tensor[:rows], "many": torch.stack([tensor] * 2, 1)[:rows]}, {"array": as_numpy[:rows]}
        )
        frame, table = data.to_pandas(), data.to_arrow()
        assert frame.dtypes.astype(str).to_dict() == {
            "one": str(as_numpy.dtype),
            "many": "object",
            "array": frame["one"].dtype,
        }
        inner = pyarrow.from_numpy_dtype(as_numpy.dtype)
        assert table.schema.types == [inner, pyarrow.large_list(inner), inner]
        assert table["one"].to_pylist() == frame["one"].tolist() == tensor[:rows].tolist()


def test_shapes_survive_even_where_there_is_nothing(table_of):
    data = DataProto.from_dict(
        {"cube": torch.arange(12).view(2, 3, 2), "none": torch.zeros(2, 0), "deep": torch.zeros(2, 3, 0)}
    )
    assert read(table_of(data)) == [
        {"cube": [[0, 1], [2, 3], [4, 5]], "none": [], "deep": [[], [], []]},
        {"cube": [[6, 7], [8, 9], [10, 11]], "none": [], "deep": [[], [], []]},
    ]
    types = data[:0].to_arrow().schema.types
    assert types[0] == pyarrow.large_list(pyarrow.large_list(pyarrow.int64()))


def test_jagged_columns(table_of):
    inner = torch.nested.nested_tensor([torch.ones(n, 2) for n in (2, 0, 1)], layout=torch.jagged)
    last = torch.nested.nested_tensor_from_jagged(torch.arange(6).view(2, 3), torch.tensor([0, 1, 1, 3]), jagged_dim=2)
    data = DataProto.from_dict({"flat": jagged([[1.0], [], [2.0, 3.0]]), "inner": inner, "last": last})
    assert read(table_of(data)) == rows_of(data)
    assert read(table_of(data[[2, 0]])) == rows_of(data[[2, 0]])
    if (table := table_of(data)) is not None and isinstance(table, pyarrow.Table):
        assert table.schema.field("flat").type == pyarrow.large_list(pyarrow.float32())


def test_objects_stay_objects_in_pandas():
    image = np.arange(6, dtype=np.uint8).reshape(2, 3)
    cells = [None, 1, "text", {"a": [1]}, image, torch.ones(2), (1, 2), math.inf]
    data = DataProto.from_dict(non_tensors={"o": cells, "uid": list("abcdefgh"), "names": np.array(list("abcdefgh"))})
    frame = data.to_pandas()
    assert set(frame.dtypes) == {np.dtype(object)}
    assert frame["o"].tolist() == [None, 1, "text", {"a": [1]}, image.tolist(), [1.0, 1.0], (1, 2), math.inf]
    assert frame["uid"].tolist() == frame["names"].tolist() == list("abcdefgh")


def test_objects_in_arrow_have_the_type_that_arrow_infers():
    image = np.arange(6, dtype=np.uint8).reshape(2, 3)
    data = DataProto.from_dict(
        non_tensors={
            "uid": ["a", None],
            "image": [image, image[:1]],
            "turns": [[{"role": "user", "n": 1}], []],
            "w": np.array(["a", "bc"]),
        }
    )
    table = data.to_arrow()
    assert table.to_pylist() == [
        {"uid": "a", "image": image.tolist(), "turns": [{"role": "user", "n": 1}], "w": "a"},
        {"uid": None, "image": image[:1].tolist(), "turns": [], "w": "bc"},
    ]
    assert table.schema.field("uid").type == pyarrow.string()


@pytest.mark.parametrize(
    "cells", [[1, "a"], [object(), 1], [2**70, 1], [{"a": 1}, [1]], np.array([1j, 2]), np.array([1, 2], ">i4")]
)
def test_to_arrow_names_columns_that_arrow_cannot_hold(cells):
    data = DataProto.from_dict({"ids": torch.arange(2)}, {"odd": cells})
    with pytest.raises(ValueError, match="to_arrow: odd has no Arrow type"):
        data.to_arrow()


def test_through_parquet(tmp_path):
    data = make(5)
    parquet.write_table(data.to_arrow(), tmp_path / "batch.parquet")
    assert parquet.read_table(tmp_path / "batch.parquet").to_pylist() == rows_of(data)


def test_no_fields_and_only_metadata(table_of):
    for data in (DataProto(), DataProto(meta_info={"step": 1})):
        assert len(table_of(data)) == 0
    assert len(make(3).select([], []).to_pandas()) == 3


def test_a_table_to_read_does_not_change_the_batch():
    data = make(3)
    frame = data.to_pandas()
    frame.loc[0, "logp"] = 9.0
    frame.loc[0, "score"] = 9.0
    frame.loc[0, "uid"] = "other"
    assert rows_of(data) == rows_of(make(3))
