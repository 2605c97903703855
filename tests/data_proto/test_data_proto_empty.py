"""Zero rows through every method: dtypes, inner shapes, fields and metadata stay."""

import copy
import pickle

import numpy as np
import pytest
import torch

from examples.unfold_columns import unfold_column_chunks
from rlprims.interop.verl import DataProto
from tests.data_proto.data_proto_batches import HAS_OBJECTS_OF_NO_ROWS, make

ORIGINS = {"new": lambda: make(0), "cut": lambda: make(4)[4:], "gather": lambda: make(4)[[]]}
CALLS = {
    "self": lambda d: d,
    "slice": lambda d: d[:],
    "slice_outside": lambda d: d[3:9],
    "step": lambda d: d[::-2],
    "list": lambda d: d[[]],
    "array": lambda d: d[np.array([], dtype=np.int64)],
    "mask": lambda d: d[torch.zeros(0, dtype=torch.bool)],
    "select": lambda d: d.select(),
    "rename": lambda d: d.rename("ids", "x").rename("x", "ids"),
    "union": lambda d: d.union(d),
    "concat": lambda d: DataProto.concat([d, d]),
    "chunk": lambda d: d.chunk(3)[2],
    "repeat": lambda d: d.repeat(3),
    "tile": lambda d: d.repeat(3, interleave=False),
    "sample_level_repeat": lambda d: d.sample_level_repeat([]),
    "unfold_column_chunks": lambda d: unfold_column_chunks(d, 2),
    "reorder": lambda d: d.reorder([]),
    "shuffle": lambda d: d.shuffle(torch.Generator()),
    "padding": lambda d: d.padding(0),
    "pad": lambda d: d.pad_to_divisor(4)[0],
    "unpad": lambda d: d.unpad(0),
    "filter": lambda d: d.filter([]),
    "filter_fn": lambda d: d.filter(lambda b: b["logp"] > 0),
    "to": lambda d: d.to("cpu"),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle4": lambda d: pickle.loads(pickle.dumps(d, 4)),  # noqa: S301
    "pickle5": lambda d: pickle.loads(pickle.dumps(d, 5)),  # noqa: S301
}


def dtypes(part):
    return {name: column.dtype for name, column in part.items()}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("origin", ORIGINS.values(), ids=ORIGINS.keys())
def test_zero_rows(call, origin):
    result, like = call(origin()), make(4)
    assert len(result) == 0
    assert set(result.batch.keys()) == set(like.batch.keys())
    assert result.batch.batch_size == torch.Size([0])
    for name, tensor in result.batch.items():
        assert tensor.dtype == like[name].dtype
        assert tensor.is_nested == like[name].is_nested
        assert tensor.is_nested or tensor.shape[1:] == like[name].shape[1:]
    assert dtypes(result.non_tensor_batch) == dtypes(like.non_tensor_batch)
    assert result.meta_info == like.meta_info
    assert len(DataProto.concat([result, like])) == 4


@pytest.mark.skipif(not HAS_OBJECTS_OF_NO_ROWS, reason="this tensordict has no object columns of zero rows")
def test_zero_rows_through_a_tensordict():
    assert len(DataProto.from_tensordict(make(0).to_tensordict())) == 0


def test_no_parts_of_zero_rows():
    empty = make(0)
    assert empty.split(2) == []
    assert empty.group_by("uid") == empty.group_by("logp") == {}
    assert list(empty) == []
    assert list(empty.make_iterator(4, 3)) == []
    assert list(empty.make_iterator(4, 3, dataloader_kwargs={"shuffle": True})) == []

    assert "0 rows" in repr(empty)
    assert empty.print_size()
    dense = empty.select(["ids", "logp"])
    assert dense.fold_batch_dim(1).batch["ids"].shape == (1, 0, 2)
    assert len(dense.fold_batch_dim(1).unfold_batch_dim()) == 0
    with pytest.raises(ValueError, match="none to copy"):
        empty.padding(1)
    assert len(empty.pop(["ids"], ["uid"])) == 0


def test_zero_rows_to_disk(tmp_path):
    pytest.importorskip("safetensors")
    make(0).save(tmp_path / "b")
    back = DataProto.load(tmp_path / "b")
    assert len(back) == 0
    assert back["ids"].shape == (0, 2)
    assert back["tokens"].is_nested
    assert back["score"].dtype == np.float64


def test_nothing_at_all():
    nothing = DataProto(meta_info={"a": 1})
    assert len(nothing[:]) == len(DataProto.concat([nothing, nothing])) == len(nothing.repeat(2)) == 0
    assert nothing.union(make(3)).meta_info == {"a": 1, **make(3).meta_info}
    assert len(nothing.union(make(3))) == len(make(3).union(nothing)) == 3
