"""DataProto: rows that are lost, objects that are shared, strings that are cut."""

import pickle

import numpy as np
import pytest
import torch

from rlprims.data_proto import DataProto


def batch(rows: int) -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.arange(rows)}, non_tensors={"name": [f"row {i}" for i in range(rows)]}
    )


def test_d1_b21_a_part_has_metadata_of_its_own() -> None:
    """verl: select, slices, chunk and repeat hand on the same dict."""
    whole = DataProto.from_dict(tensors={"x": torch.arange(4)}, meta_info={"seen": [1]})
    for part in (whole[:2], whole.chunk(2)[0], whole.repeat(2), whole.select(["x"]), whole.select_idxs([0])):
        part.meta_info["seen"].append(2)
        part.meta_info["new"] = True
    assert whole.meta_info == {"seen": [1]}


def test_d2_pickling_changes_nothing() -> None:
    """verl 083da9ab1: __getstate__ wrote into the batch that was sent."""
    data = batch(3)
    first, second = pickle.dumps(data, protocol=5), pickle.dumps(data, protocol=5)
    assert first == second
    assert data["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("rows", range(10))
@pytest.mark.parametrize("size", range(1, 10))
def test_d5_d6_no_row_is_lost_however_it_is_cut(rows: int, size: int) -> None:
    """verl#115, #2741, #3933: uneven parts were an error or a loss, and an empty batch could not be sent."""
    data = batch(rows)
    parts = data.split(size)
    assert [x for part in parts for x in part["x"].tolist()] == [*range(rows)]
    assert [name for part in parts for name in part["name"]] == [f"row {i}" for i in range(rows)]
    if rows % size:
        with pytest.raises(ValueError, match=f"{rows} rows do not divide into {size} equal parts"):
            data.chunk(size)
    else:
        assert sum(len(part) for part in data.chunk(size)) == rows


def test_d7_a_numpy_index_leaves_plain_lengths() -> None:
    """verl ea81658b5: a boolean array made the batch size a numpy integer."""
    part = batch(4)[np.array([True, False, True, True])]
    assert type(len(part)) is int
    assert all(type(size) is int for size in part.batch.batch_size)


def test_d8_d9_columns_of_other_lengths_are_refused() -> None:
    """OpenRLHF 0028a82a zipped them to the shortest; verl a80ed95e7 repeated one side only."""
    with pytest.raises(ValueError, match="name"):
        DataProto.from_dict(tensors={"x": torch.arange(3)}, non_tensors={"name": ["a", "b"]})
    with pytest.raises(ValueError, match="rows"):
        batch(2).repeat(2).union(DataProto.from_dict(tensors={"y": torch.arange(2)}))


def test_d11_a_longer_string_is_not_cut() -> None:
    """A numpy array of strings has the width of its longest and cuts what is written into it."""
    data = DataProto.from_dict(non_tensors={"name": ["a", "b"]})
    data["name"][0] = "longer"
    assert data["name"][0] == "longer"
    peer = np.array(["a", "b"])
    peer[0] = "longer"
    assert peer[0] == "l"
