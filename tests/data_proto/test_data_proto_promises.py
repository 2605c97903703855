"""One test per promise of the container."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from examples.unfold_columns import unfold_column_chunks
from rlprims.data_proto import MissingField, RowIndexError
from rlprims.interop.verl import DataProto
from tests.data_proto.data_proto_batches import jagged, make, rows_of

# Every method that returns a batch, as a function of a batch of 6 rows.
METHODS = {
    "slice": lambda d: d[1:4],
    "step": lambda d: d[::2],
    "index": lambda d: d[[3, 1, 1]],
    "mask": lambda d: d[np.array([True, False] * 3)],
    "select": lambda d: d.select(["ids"], ["uid"]),
    "rename": lambda d: d.rename("ids", "input_ids"),
    "union": lambda d: d.union(DataProto.from_dict({"new": torch.zeros(6)})),
    "union_into": lambda d: DataProto.from_dict({"new": torch.zeros(6)}).union(d),
    "concat": lambda d: DataProto.concat([d, d]),
    "chunk": lambda d: d.chunk(2)[0],
    "chunk_padded": lambda d: d.chunk(4, pad=True)[3],
    "split": lambda d: d.split(4)[1],
    "repeat": lambda d: d.repeat(2),
    "sample_level_repeat": lambda d: d.sample_level_repeat([1, 2, 0, 1, 1, 1]),
    "unfold_column_chunks": lambda d: unfold_column_chunks(d, 2, ["ids"]),
    "fold": lambda d: d.select(["ids", "logp"]).fold_batch_dim(3),
    "unfold": lambda d: d.select(["ids"], ["uid"]).fold_batch_dim(3).unfold_batch_dim(),
    "reorder": lambda d: d.reorder([5, 4, 3, 2, 1, 0]),
    "shuffle": lambda d: d.shuffle(torch.Generator("cpu").manual_seed(0)),
    "padding": lambda d: d.padding(2, "first"),
    "pad": lambda d: d.pad_to_divisor(4)[0],
    "pad_nothing": lambda d: d.pad_to_divisor(3)[0],
    "unpad": lambda d: d.unpad(1),
    "iterator": lambda d: next(d.make_iterator(3, 1)),
    "group_by": lambda d: d.group_by("uid")["u1"],
    "filter": lambda d: d.filter(lambda batch: batch["logp"] > 0.2),
    "to": lambda d: d.to("cpu"),
    "tensordict": lambda d: DataProto.from_tensordict(d.to_tensordict()),
}


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


def test_the_receiver_stays_as_it_is(method):
    data = make(6)
    memory = {name: tensor.data_ptr() for name, tensor in data.batch.items() if not tensor.is_nested}
    method(data)
    assert rows_of(data) == rows_of(make(6))
    assert data.meta_info == make(6).meta_info
    assert {name: tensor.data_ptr() for name, tensor in data.batch.items() if not tensor.is_nested} == memory


def test_results_share_no_metadata_and_no_object_array(method):
    data = make(6)
    child = method(data)
    child.meta_info["step"] = 99
    child.meta_info["notes"]["tags"].append("b")
    child.meta_info["more"] = 1
    for array in child.non_tensor_batch.values():
        array[...] = None if array.dtype == object else -1
    child["other"] = torch.zeros(len(child))
    child.batch.set("another", torch.zeros(len(child)))
    if "uid" in child:
        child.non_tensor_batch.pop("uid")
    assert rows_of(data) == rows_of(make(6))
    assert data.meta_info == make(6).meta_info


def test_dtypes_survive(method):
    data, child = make(6), method(make(6))
    for name, tensor in child.batch.items():
        before = data.batch.get(name if name != "input_ids" else "ids", tensor)
        assert tensor.dtype == before.dtype
    if method is not METHODS["tensordict"]:  # which has no place for arrays of numbers
        for name, array in child.non_tensor_batch.items():
            assert array.dtype == data.non_tensor_batch[name].dtype


def test_arrays_in_object_columns_survive():
    data = make(6)
    for child in (
        data[::-1],
        data.repeat(2),
        DataProto.concat([data, data]),
        data.chunk(2)[1],
        data.padding(1),
    ):
        image = child["image"]
        assert image.shape == (len(child),)
        for uid, cell in zip(child["uid"], image, strict=True):
            row = int(uid[1:])
            assert isinstance(cell, np.ndarray)
            assert cell.tolist() == [[row] * (row % 2 + 1)] * 2


def test_equally_long_lists_and_arrays_stay_one_cell_per_row():
    data = DataProto.from_dict(non_tensors={"turns": [[1, 2], [3, 4]], "image": [np.zeros((2, 2)), np.ones((2, 2))]})
    assert data["turns"].shape == data["image"].shape == (2,)
    assert data["turns"][1] == [3, 4]


def test_parts_of_a_locked_batch_may_get_fields():
    data = make(6).select(["ids"])
    data.batch.lock_()
    for part in (data[:3], *data.chunk(2), *data.split(4), data[[1, 0]]):
        part["new"] = torch.zeros(len(part))
        assert part["new"].tolist() == [0] * len(part)
    assert "new" not in data


def test_a_callers_dicts_stay_as_they_are():
    tensors, others, meta = {"ids": torch.arange(2)}, {"uid": ["a", "b"]}, {"tags": ["x"]}
    data = DataProto.from_dict(tensors, others, meta)
    single = {"ids": tensors["ids"], "uid": others["uid"]}
    both = DataProto.from_single_dict(single, meta)
    batch = TensorDict({"ids": torch.arange(2)}, batch_size=[2])
    wrapped = DataProto(batch, others, meta)
    for made in (data, both, wrapped):
        made["new"] = torch.zeros(2)
        made["more"] = ["c", "d"]
        made["n"] = 1
        made.meta_info["tags"].append("y")
        made.pop(["ids"], ["uid"])
    assert list(tensors) == ["ids"]
    assert others == {"uid": ["a", "b"]}
    assert meta == {"tags": ["x"]}
    assert list(single) == ["ids", "uid"]
    assert list(batch.keys()) == ["ids"]


def test_metadata_of_any_kind_is_copied():
    lock = iter(())  # cannot be copied, so it is shared
    meta = {"a": np.zeros(2), "t": torch.zeros(2), "s": {1}, "nested": ([1], {"k": [2]}), "lock": lock}
    child = DataProto.from_dict({"ids": torch.arange(2)}, meta_info=meta)[:1]
    child.meta_info["a"][0] = child.meta_info["t"][0] = 9
    child.meta_info["s"].add(2)
    child.meta_info["nested"][0].append(9)
    child.meta_info["nested"][1]["k"].append(9)
    assert meta["a"].tolist() == meta["t"].tolist() == [0, 0]
    assert meta["s"] == {1}
    assert meta["nested"] == ([1], {"k": [2]})


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"union", "union_into"}))  # which make a tensor here
def test_the_default_device_does_not_matter(name):
    data, expected = make(6), METHODS[name](make(6))
    with torch.device("meta"):
        result = METHODS[name](data)
    assert rows_of(result) == rows_of(expected)


# Views.


def test_contiguous_rows_are_views():
    data = make(6)
    parts = {
        0: [data[:2], data.chunk(3)[0], data.split(2)[0], data[[0, 1]], data[torch.tensor([True, True, *[False] * 4])]],
        2: [data[2:4], data.chunk(3)[1], list(data.make_iterator(2, 1))[1]],
    }
    for start, children in parts.items():
        for child in children:
            for name in ("ids", "logp"):
                assert child[name].data_ptr() == data[name][start:].data_ptr()
            start_of_values = data["tokens"].offsets()[start]
            assert child["tokens"].values().data_ptr() == data["tokens"].values()[start_of_values:].data_ptr()


@given(rows=st.integers(0, 9), chunks=st.integers(1, 12))
def test_a_padded_chunk_is_what_padding_and_then_chunking_gives(rows, chunks):
    data = make(rows)
    parts = data.chunk(chunks, pad=True)
    padded, added = data.pad_to_divisor(chunks)
    assert [rows_of(part) for part in parts] == [rows_of(part) for part in padded.chunk(chunks)]
    assert rows_of(DataProto.concat(parts).unpad(added)) == rows_of(data)
    size = len(padded) // chunks
    for number, part in enumerate(parts):  # whole parts are views; a write into an added row reaches no other part
        whole = (number + 1) * size <= rows
        assert not size or (part["ids"].data_ptr() == data["ids"][number * size :].data_ptr()) == whole
        if not whole:
            part["ids"].fill_(-1)
    assert rows_of(data) == rows_of(make(rows))


def test_joined_chunks_are_the_batch_and_share_no_memory_with_it():
    data = make(6)
    joined = DataProto.concat(data.chunk(3))
    assert rows_of(joined) == rows_of(data)
    joined["ids"].fill_(-1)
    assert rows_of(data) == rows_of(make(6))
    alone = DataProto.concat([data])
    alone["ids"].fill_(-1)
    assert rows_of(data) == rows_of(make(6))
    gapped = DataProto.concat([data[:2], data[3:5]])
    assert rows_of(gapped) == rows_of(data[[0, 1, 3, 4]])


@given(
    cuts=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    columns=st.sampled_from([slice(None), slice(0, 1), slice(None, None, 2)]),
)
def test_joining_is_what_cat_does(cuts, columns):
    base = torch.arange(6 * 4).view(6, 4)[:, columns]
    ends = [0, *sorted(cuts), 6]
    parts = [DataProto.from_dict({"x": base[a:b]}) for a, b in pairwise(ends)]
    assert torch.equal(DataProto.concat(parts)["x"], base)
    assert torch.equal(DataProto.concat(parts[::-1])["x"], torch.cat([part["x"] for part in parts[::-1]]))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("interleave", [True, False])
def test_repeated_rows_share_no_memory(rows, interleave):
    data = make(rows)
    repeats = data.repeat(3, interleave=interleave)
    repeats["ids"][:1] = -1
    assert (repeats["ids"] == -1).any(-1).tolist() == [True] + [False] * (3 * rows - 1)
    assert rows_of(data) == rows_of(make(rows))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (torch.arange(4)[:2], torch.arange(4).int()[:0]),
        (torch.zeros(4, 2)[:2], torch.zeros(0, 3)),
        (torch.zeros(2, 2), torch.zeros(2, 3)),
        (torch.zeros(2), jagged([[1.0], []])),
    ],
)
def test_concat_refuses_different_kinds_even_of_no_rows(one, two):
    with pytest.raises(ValueError, match=r"concat: x has different kinds|rows of x have different shapes"):
        DataProto.concat([DataProto.from_dict({"x": one}), DataProto.from_dict({"x": two})])


def test_parts_without_rows_do_not_stand_in_the_way():
    data = make(6).select(["ids", "logp"])
    joined = DataProto.concat([make(6)[:0].select(["ids", "logp"]), data[:2], data[3:3], data[2:], data[6:]])
    assert rows_of(joined) == rows_of(data)
    assert rows_of(DataProto.concat([data[:0], data[:0]])) == []


def test_lazily_conjugated_parts_are_joined_by_value():
    x = torch.tensor([1j, 2j, 3j, 4j])
    parts = [{"x": x.conj()[:2]}, {"x": x[2:]}, {"x": x.conj().imag[:2]}, {"x": x.conj().imag[2:]}]
    batches = [DataProto.from_dict(part) for part in parts]
    assert DataProto.concat(batches[:2])["x"].tolist() == [-1j, -2j, 3j, 4j]
    assert DataProto.concat(batches[2:])["x"].tolist() == [-1, -2, -3, -4]


def test_gradients_flow_through_rows_and_joins():
    weight = torch.arange(4.0, requires_grad=True)
    data = DataProto.from_dict({"x": weight * 2})
    joined = DataProto.concat([*data.chunk(2), data[[3, 3]]])
    joined["x"].sum().backward()
    assert weight.grad.tolist() == [2, 2, 2, 6]


def one(**fields):
    return DataProto.from_single_dict(fields)


# union.


def test_union_names_the_key_and_the_reason():
    base = one(x=torch.zeros(2, 3), y=np.array([1.0, 2.0]))
    for other, reason in (
        (one(x=torch.ones(2, 3)), "'x' and 6 of 6 values differ"),
        (one(x=torch.zeros(2, 3).double()), "'x' and dtype float32 and float64"),
        (one(x=torch.zeros(2, 2)), r"'x' and shape \(2, 3\) and \(2, 2\)"),
        (one(x=np.zeros((2, 3))), "'x' and one is a tensor"),
        (one(x=jagged([[1.0], []])), "'x' and shape"),
        (one(y=np.array([1.0, 3.0])), "'y' and the values differ"),
        (one(z=torch.zeros(3)), "2 rows and 3 rows"),
    ):
        with pytest.raises(ValueError, match=reason):
            base.union(other)
    with pytest.raises(ValueError, match=r"meta_info\['a'\] and it is 1 here and 2 there"):
        DataProto(meta_info={"a": 1}).union(DataProto(meta_info={"a": 2}))
    assert set(base.batch.keys()) == {"x"}


def test_union_of_equal_fields_where_nan_equals_nan():
    cells = [np.array([1.0, math.nan]), {"a": [math.nan, "t"]}, math.nan, None]
    again = [np.array([1.0, math.nan]), {"a": [float("nan"), "t"]}, float("nan"), None]
    x = torch.tensor([1.0, math.nan, 3.0, 0.0])
    rows = [[1.0], [], [math.nan], [2.0, 3.0]]
    one = DataProto.from_dict({"x": x, "t": jagged(rows)}, {"o": cells, "f": x.numpy()}, {"m": np.array([math.nan])})
    two = DataProto.from_dict(
        {"x": x.clone(), "t": jagged(rows)}, {"o": again, "f": x.numpy().copy()}, {"m": np.array([math.nan])}
    )
    assert one.union(two)["x"] is x
    two.non_tensor_batch["o"][1] = {"a": [0.0, "t"]}
    with pytest.raises(ValueError, match="'o' and the values differ"):
        one.union(two)


def test_union_compares_objects_that_contain_themselves():
    def cyclic(last):
        cell = np.array([None, last], dtype=object)
        cell[0] = cell
        return DataProto.from_dict(non_tensors={"c": [cell]})

    cyclic(1).union(cyclic(1))
    with pytest.raises(ValueError, match="'c'"):
        cyclic(1).union(cyclic(2))


def test_union_does_not_read_shared_memory(monkeypatch):
    data = make(4)
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("compared"))
    assert set(data[:].select(["ids", "logp"]).union(data[:].select(["ids"])).batch.keys()) == {"ids", "logp"}


# Assignment.


def test_assignment_puts_a_value_into_the_part_it_fits():
    data = DataProto()
    data["ids"] = torch.arange(3)
    data["uid"] = ["a", "b", "c"]
    data["score"] = np.arange(3.0)
    data["step"] = 4
    data["name"] = "run"
    assert list(data.batch.keys()) == ["ids"]
    assert list(data.non_tensor_batch) == ["uid", "score"]
    assert data.meta_info == {"step": 4, "name": "run"}
    data["uid"] = torch.zeros(3)
    assert "uid" not in data.non_tensor_batch
    assert data["uid"].tolist() == [0, 0, 0]
    data["ids"] = ["x", "y", "z"]
    assert data["ids"].tolist() == ["x", "y", "z"]


# Errors.


def test_errors_are_value_errors_that_list_the_fields():
    data = make(6)
    calls = {
        "unknown": lambda: data["advantages"],
        "unknown_item": lambda: data[0]["advantages"],
        "select": lambda: data.select(["nope"]),
        "select_object": lambda: data.select(non_tensor_batch_keys=["nope"]),
        "select_meta": lambda: data.select(meta_info_keys=["nope"]),
        "pop": lambda: data.pop(["ids", "nope"]),
        "rename": lambda: data.rename("nope", "x"),
        "rename_taken": lambda: data.rename("ids", "uid"),
        "mask": lambda: data[np.array([True, False])],
        "mask_list": lambda: data[[True]],
        "filter": lambda: data.filter(torch.ones(5, dtype=torch.bool)),
        "row": lambda: data[6],
        "rows": lambda: data[[0, -7]],
        "chunk": lambda: data.chunk(7),
        "assign": lambda: data.__setitem__("adv", torch.zeros(5)),
        "assign_list": lambda: data.__setitem__("adv", ["a"]),
        "group": lambda: data.group_by("nope"),
        "group_meta": lambda: data.group_by("step"),
        "union": lambda: data.union(make(5)),
        "concat_missing": lambda: DataProto.concat([data, data.select(["ids"])]),
        "unfold": lambda: data.select(["ids", "logp"]).unfold_batch_dim(3),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=r"(?s)fields: batch \[.*ids.*\], non_tensor_batch \[.*meta_info \["):
            call()
    assert rows_of(data) == rows_of(make(6))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: DataProto.concat([]), "no batches"),
        (lambda d: DataProto.concat([d, d.rename("ids", "x")]), r"\[ids, x\]"),
        (lambda d: DataProto.concat([one(x=torch.zeros(1)), one(x=torch.zeros(1).double())]), "x has different kinds"),
        (lambda d: DataProto.concat([one(x=torch.zeros(1, n)) for n in (2, 3)]), "rows of x have different shapes"),
        (lambda d: DataProto.concat([DataProto(meta_info={"a": n}) for n in (2, 3)]), r"meta_info\['a'\] is 2"),
        (lambda d: DataProto.concat([one(x=np.zeros(1, t)) for t in ("f4", "f8")]), "x has different dtypes"),
        (lambda d: one(a=torch.zeros(2), b=torch.zeros(3), c=[1]), "'a': 2, 'b': 3, 'c': 1"),
        (lambda d: DataProto.from_dict({"a": torch.tensor(1)}), "'a'.*scalar"),
        (lambda d: DataProto.from_dict({"a": np.zeros(2)}), "'a'.*ndarray"),
        (lambda d: DataProto.from_dict({"a": torch.zeros(2)}, {"a": [1, 2]}), r"both have \[a\]"),
        (lambda d: DataProto.from_dict({"a": torch.nested.nested_tensor([torch.zeros(1)])}), "torch.jagged"),
        (lambda d: DataProto.from_dict(non_tensors={"a": np.array(1.0)}), "'a'.*one entry per row"),
        (lambda d: DataProto.from_dict(auto_padding=True), "pad_to_divisor"),
        (lambda d: DataProto(TensorDict({"n": TensorDict({}, [2])}, [2])), "flatten_keys"),
        (lambda d: d[True], "integer"),
        (lambda d: d[(0, 1)], "tuple"),
        (lambda d: d[[0.5]], "float"),
        (lambda d: d[["ids"]], "integers or a mask"),
        (lambda d: d[torch.zeros(1, 2, dtype=torch.long)], "one dimension"),
        (lambda d: d[::0], "step is 0"),
        (lambda d: d.filter([1, 0, 1, 0, 1, 0]), "one boolean per row"),
        (lambda d: d.filter(lambda b: b["ids"]), "one boolean per row"),
        (lambda d: d.reorder([0, 1]), "each row exactly once"),
        (lambda d: d.reorder([0, 0, 1, 2, 3, 4]), "each row exactly once"),
        (lambda d: d.chunk(0), "0 equal parts"),
        (lambda d: d.split(0), "at least 1"),
        (lambda d: d.repeat(-1), "at least 0"),
        (lambda d: d.sample_level_repeat([1, 2]), "6 rows"),
        (lambda d: d.sample_level_repeat([-1] * 6), "at least 0"),
        (lambda d: d.sample_level_repeat({"times": 2}), "one integer per row"),
        (lambda d: d.padding(1, "middle"), "'middle'"),
        (lambda d: d.pad_to_divisor(0), "at least 1"),
        (lambda d: d.unpad(7), "7 rows off 6"),
        (lambda d: d.make_iterator(4, 1), "divide"),
        (lambda d: d.make_iterator(3, 1, dataloader_kwargs={"num_workers": 2}), "num_workers"),
        (lambda d: d.group_by("image"), "cannot be a dict key"),
        (lambda d: d.group_by("ids"), "one value per row"),
        (lambda d: d.fold_batch_dim(4), "4 equal rows"),
        (lambda d: d.fold_batch_dim(3), "tokens is jagged"),
        (lambda d: unfold_column_chunks(d, 3, ["ids"]), "ids.*3 equal parts"),
        (lambda d: unfold_column_chunks(d, 2, ["nope"]), "no column 'nope'; the columns are .*ids"),
        (lambda d: unfold_column_chunks(d, 2, ["tokens"]), "tokens is jagged"),
        (lambda d: unfold_column_chunks(d, 0), "n_split is 0"),
        (lambda d: d.rename(["ids", "uid"], ["x"]), "2 old names"),
        (lambda d: d.__setitem__("uid", "all"), "one entry per row"),
        (lambda d: d.__setitem__(0, [1]), "by its name"),
    ],
)  # fmt: skip
def test_wrong_calls_say_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call(make(6))


def test_kinds_of_error():
    data = make(2)
    with pytest.raises(KeyError) as caught:
        data["nope"]
    assert isinstance(caught.value, MissingField)
    assert str(caught.value).startswith("no field 'nope'; fields: batch [ids, logp, tokens]")
    with pytest.raises(IndexError) as caught:
        data[5]
    assert isinstance(caught.value, RowIndexError)


def test_a_write_into_the_parts_that_breaks_the_batch_is_found():
    data = make(3)
    data.non_tensor_batch["bad"] = np.array([1])
    for call in (
        data.check_consistency,
        lambda: data[:2],
        lambda: data.select(["ids"]),
        lambda: DataProto.concat([data]),
    ):
        with pytest.raises(ValueError, match="'bad': 1"):
            call()
    assert "bad" in repr(data)


# For a reader.


def test_the_text_says_fields_shapes_dtypes_and_bytes():
    text = repr(make(6))
    lines = [line.split() for line in text.splitlines()]
    assert lines[0][:3] == ["DataProto:", "6", "rows,"]
    assert ["batch", "ids", "int64", "(6,", "2)", "96", "B"] in lines
    assert ["batch", "tokens", "float32", "(6,", "*)", "24", "B"] in lines
    assert ["non_tensor_batch", "score", "float64", "(6,)", "48", "B"] in lines
    assert ["meta_info", "step", "int", "3"] in lines
    assert make(6).get_data_info() == text
    assert make(6).print_size("x").startswith("x: batch 168 B, non_tensor_batch ")
