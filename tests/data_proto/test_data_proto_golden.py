"""Semantics that code written for verl's DataProto relies on: small cases, written by hand from its behaviour."""

import doctest

import numpy as np
import pytest
import torch

import examples.unfold_columns
from examples.unfold_columns import unfold_column_chunks
from rlprims.interop.verl import (
    DataProto,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)


@pytest.fixture
def data():
    return DataProto.from_dict(
        tensors={"obs": torch.tensor([[1, 2], [3, 4], [5, 6]])},
        non_tensors={"labels": ["a", "b", "c"]},
        meta_info={"info": "x"},
    )


def obs(data):
    return data.batch["obs"].tolist()


def labels(data):
    return data.non_tensor_batch["labels"].tolist()


def test_the_three_parts(data):
    assert data.batch.batch_size == torch.Size([3])
    assert data.non_tensor_batch["labels"].dtype == object
    assert data.meta_info == {"info": "x"}
    assert len(data) == 3


def test_from_single_dict_sorts_by_type():
    data = DataProto.from_single_dict({"x": torch.zeros(2), "y": np.array([1.0, 2.0])}, meta_info={"k": 1})
    assert data.batch["x"].shape == (2,)
    assert data.non_tensor_batch["y"].dtype == np.float64
    with pytest.raises(ValueError, match=r"'z'\] is str"):
        DataProto.from_single_dict({"z": "text"})


def test_subclasses_stay_what_they_are(data):
    class Mine(DataProto):
        pass

    mine = Mine.from_dict({"x": torch.arange(4)})
    assert type(mine) is type(mine[:2]) is type(mine.chunk(2)[0]) is type(Mine.concat(mine.chunk(2))) is Mine


def test_lengths_of_partial_batches():
    uid = np.array(["a", "b"], dtype=object)
    assert len(DataProto(batch=None, non_tensor_batch={"uid": uid})) == 2
    assert len(DataProto(batch=None, non_tensor_batch=None, meta_info={"a": 1})) == 0
    assert len(DataProto()) == 0


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ([2, 0], ["c", "a"]),
        ([-1], ["c"]),
        (range(2), ["a", "b"]),
        (np.array([1, 1]), ["b", "b"]),
        (torch.tensor([2, 1, 0]), ["c", "b", "a"]),
        (np.array([0, 2], dtype=np.uint8), ["a", "c"]),
        ([True, False, True], ["a", "c"]),
        ([np.bool_(False), np.bool_(True), np.bool_(False)], ["b"]),
        (np.array([False, False, True]), ["c"]),
        (torch.tensor([True, True, False]), ["a", "b"]),
        (slice(1, None), ["b", "c"]),
        (slice(None, -1), ["a", "b"]),
        (slice(None, None, 2), ["a", "c"]),
        (slice(None, None, -1), ["c", "b", "a"]),
        (slice(5, 9), []),
        ([], []),
    ],
)
def test_indexing(data, index, expected):
    picked = data[index]
    assert labels(picked) == expected
    assert obs(picked) == [obs(data)["abc".index(label)] for label in expected]
    assert picked.batch.batch_size == torch.Size([len(expected)])
    assert all(type(size) is int for size in picked.batch.batch_size)


@pytest.mark.parametrize("index", [1, -2, np.int64(1), torch.tensor(1), np.array(1)])
def test_an_integer_gives_an_item(data, index):
    item = data[index]
    assert item.batch["obs"].tolist() == [3, 4]
    assert item.batch.batch_size == torch.Size([])
    assert item.non_tensor_batch["labels"] == "b"
    assert item.meta_info == {"info": "x"}
    assert item["labels"] == "b"
    assert item["info"] == "x"


def test_iteration_gives_every_row(data):
    assert [item["labels"] for item in data] == ["a", "b", "c"]


def test_select_shares_tensors_and_deepcopy_does_not(data):
    chosen = data.select(batch_keys=["obs"], non_tensor_batch_keys=[], meta_info_keys=[])
    assert chosen.batch["obs"].data_ptr() == data.batch["obs"].data_ptr()
    assert chosen.non_tensor_batch == {}
    assert chosen.meta_info == {}
    assert data.select(deepcopy=True).batch["obs"].data_ptr() != data.batch["obs"].data_ptr()


def test_pop_removes_and_returns(data):
    data["act"] = torch.zeros(3)
    data.meta_info["n"] = 1
    taken = data.pop(batch_keys=["obs"], meta_info_keys=["n"])
    assert set(taken.batch.keys()) == {"obs"}
    assert taken.meta_info == {"n": 1}
    assert set(data.batch.keys()) == {"act"}
    assert data.meta_info == {"info": "x"}
    assert data.pop(non_tensor_batch_keys=["labels"]).batch is None
    assert data.non_tensor_batch == {}
    data.pop(batch_keys=["act"])
    assert len(data) == 3


def test_rename(data):
    assert set(data.rename("obs", "ids").batch.keys()) == {"ids"}
    assert set(data.rename(["obs"], ["ids"]).batch.keys()) == {"ids"}


def test_union_adds_fields(data):
    other = DataProto.from_dict({"adv": torch.zeros(3)}, {"labels": ["a", "b", "c"], "tag": [1, 2, 3]}, {"n": 2})
    both = data.union(other)
    assert set(both.batch.keys()) == {"obs", "adv"}
    assert set(both.non_tensor_batch) == {"labels", "tag"}
    assert both.meta_info == {"info": "x", "n": 2}


def test_chunk_and_concat():
    data = DataProto.from_dict({"obs": torch.arange(6)}, {"labels": list("abcdef")}, {"name": "n"})
    parts = data.chunk(2)
    assert [labels(part) for part in parts] == [["a", "b", "c"], ["d", "e", "f"]]
    assert all(part.meta_info == {"name": "n"} for part in parts)
    joined = DataProto.concat(parts)
    assert obs(joined) == obs(data)
    assert labels(joined) == labels(data)
    assert joined.meta_info == data.meta_info
    with pytest.raises(AssertionError):  # what code written for verl catches
        data.chunk(5)


def test_split_keeps_the_rest(data):
    assert [labels(part) for part in data.split(2)] == [["a", "b"], ["c"]]
    assert [labels(part) for part in data.split(9)] == [["a", "b", "c"]]


def test_repeat(data):
    assert labels(data.repeat(2, interleave=True)) == ["a", "a", "b", "b", "c", "c"]
    assert labels(data.repeat(2, interleave=False)) == ["a", "b", "c", "a", "b", "c"]
    assert obs(data.repeat(repeat_times=2, interleave=False)) == obs(data) * 2


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
def test_repeated_rows_have_memory_of_their_own(rows, interleave):
    data = DataProto.from_dict({"x": torch.zeros(rows, 3)})
    repeated = data.repeat(2, interleave)
    repeated["x"][0] = 1
    assert repeated["x"].sum() == 3
    assert data["x"].sum() == 0


@pytest.mark.parametrize("times", [[3, 0, 2], (3, 0, 2), np.array([3, 0, 2]), torch.tensor([3, 0, 2])])
def test_sample_level_repeat(data, times):
    assert labels(data.sample_level_repeat(times)) == ["a", "a", "a", "c", "c"]


@pytest.mark.parametrize(("divisor", "expected"), [(1, "abc"), (2, "abca"), (3, "abc"), (7, "abcabca")])
def test_pad_cycles_from_the_start_and_unpad_undoes_it(data, divisor, expected):
    padded, added = pad_dataproto_to_divisor(data, divisor)
    assert "".join(labels(padded)) == expected
    assert added == len(expected) - 3
    assert padded.meta_info == data.meta_info
    assert labels(unpad_dataproto(padded, added)) == ["a", "b", "c"]


def test_padding_appends_the_first_or_last_row(data):
    assert labels(data.padding(2, "first")) == ["a", "b", "c", "a", "a"]
    assert labels(data.padding(1, "last")) == ["a", "b", "c", "c"]


def test_fold_reorder_unfold(data):
    folded = fold_batch_dim(data.repeat(2), new_batch_size=3)
    assert folded.batch["obs"].tolist() == [[[1, 2], [1, 2]], [[3, 4], [3, 4]], [[5, 6], [5, 6]]]
    assert labels(folded) == [["a", "a"], ["b", "b"], ["c", "c"]]
    back = unfold_batch_dim(folded.reorder(torch.tensor([1, 2, 0])), batch_dims=2)
    assert obs(back) == [[3, 4], [3, 4], [5, 6], [5, 6], [1, 2], [1, 2]]
    assert labels(back) == ["b", "b", "c", "c", "a", "a"]


def test_its_examples():
    assert doctest.testmod(examples.unfold_columns) == (0, 5)


def test_unfold_column_chunks_splits_some_and_repeats_others(data):
    data["wide"] = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    cut = unfold_column_chunks(data, 2, split_keys=["wide"])
    assert cut.batch["wide"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]]
    assert obs(cut) == [[1, 2], [1, 2], [3, 4], [3, 4], [5, 6], [5, 6]]
    assert labels(cut) == ["a", "a", "b", "b", "c", "c"]


def test_unfold_column_chunks_of_objects():
    lists = DataProto.from_dict(non_tensors={"pair": [["a1", "a2"], ["b1", "b2"]]})
    assert unfold_column_chunks(lists, 2, ["pair"])["pair"].tolist() == [["a1"], ["a2"], ["b1"], ["b2"]]
    table = DataProto.from_dict(non_tensors={"pair": np.array([["a1", "a2"], ["b1", "b2"]], dtype=object)})
    assert unfold_column_chunks(table, 2, ["pair"])["pair"].tolist() == [["a1"], ["a2"], ["b1"], ["b2"]]


def test_concat_collects_metrics():
    parts = [
        DataProto.from_dict({"x": torch.zeros(n)}, meta_info={"step": 1, "metrics": m})
        for n, m in ((3, [{"loss": 1.0}]), (2, [{"loss": 2.0}]))
    ]
    assert DataProto.concat(parts).meta_info == {"step": 1, "metrics": {"loss": [1.0, 2.0]}}


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [([None, {"loss": 2.0}], {"metrics": {"loss": [2.0]}}), ([None, None], {}), ([[], []], {})],
)
def test_concat_of_workers_without_metrics(metrics, expected):
    parts = [DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"metrics": each}) for each in metrics]
    assert DataProto.concat(parts).meta_info == expected


def test_concat_of_concats_collects_the_same_metrics():
    def worker(loss, **more):
        return DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"metrics": {"loss": loss, **more}})

    a, b, c = worker(1.0), worker(2.0, clip=0.5), worker(3.0)
    once = DataProto.concat([a, b, c])
    twice = DataProto.concat([DataProto.concat([a, b]), c])
    assert once.meta_info == twice.meta_info == {"metrics": {"loss": [1.0, 2.0, 3.0], "clip": [0.5]}}


def test_make_iterator():
    data = DataProto.from_dict({"x": torch.arange(12)}, {"y": np.arange(12.0)}, {"k": 1})
    plain = list(data.make_iterator(4, epochs=2))
    assert [part["x"].tolist() for part in plain] == 2 * [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert plain[0].meta_info == {"k": 1}
    assert plain[0]["y"].dtype == np.float64

    def order(seed):
        return [p["x"].tolist() for p in data.make_iterator(4, 2, seed=seed, dataloader_kwargs={"shuffle": True})]

    assert order(1) == order(1) != order(2)
    first, second = np.concatenate(order(1)[:3]).tolist(), np.concatenate(order(1)[3:]).tolist()
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_to_tensordict_and_back(data):
    flat = data.to_tensordict()
    assert flat["obs"].tolist() == obs(data)
    assert flat["labels"] == ["a", "b", "c"]
    assert flat["info"] == "x"
    back = DataProto.from_tensordict(flat)
    assert (obs(back), labels(back), back.meta_info) == (obs(data), labels(data), data.meta_info)


def test_one_batch_dimension_only():
    with pytest.raises(AssertionError):
        DataProto.from_dict({"x": torch.zeros(2, 3)}, num_batch_dims=2)
