"""Every difference between this library's DataProto and verl's: what verl really does, what is done here, and why."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.peers.beside import (
    after,
    broken,
    changed,
    concat,
    jagged,
    make,
    names,
    objects,
    of,
    ours,
    reports,
    uids,
    unfold_column_chunks,
    verls,
)

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # the warnings of verl, Ray and tensordict
T = torch.tensor


class Difference(NamedTuple):
    """A call, verl's answer or error, this library's, and the reason for not being the same."""

    call: Callable[[Any], Any]
    verl: Any
    ours: Any
    why: str


def shared(one, other):
    return one.batch["ids"].untyped_storage().data_ptr() == other.batch["ids"].untyped_storage().data_ptr()


def written_once(P):
    """How many rows a write into one row of a repeat reaches."""
    repeated = of(P, {"x": [0]}).repeat(3, interleave=False)
    repeated.batch["x"][0] = 1
    return int(repeated.batch["x"].sum())


def subclass(P):
    class Mine(P.DataProto):
        pass

    return Mine.from_dict({"x": T([1, 2, 3, 4])})


def callers_list(P):
    mine = {"uid": ["a", "b"]}
    P.DataProto.from_dict({"x": T([1, 2])}, mine)
    return type(mine["uid"])


def callers_metadata(P):
    mine = {}
    P.DataProto.from_tensordict(TensorDict({"x": T([1]), "k": NonTensorData(1)}, [1]), mine)
    return mine


def callers_tensordict(P):
    mine = TensorDict({"x": T([1])}, [1])
    P.DataProto(mine).batch["y"] = T([2])
    return sorted(mine.keys())


def from_tensordict(P, **values):
    return P.DataProto.from_tensordict(TensorDict(values, [2]))


def pair(P, values):
    """The shape of an object column, made of one value per row."""
    return P.DataProto.from_dict({"x": T([1, 2])}, {"pair": values}).non_tensor_batch["pair"].shape


def union_tensors(P, one, other):
    return of(P, {"a": [one]}).union(of(P, {"a": [other]})).batch["a"].tolist()


def union_cells(P, one, other):
    return len(of(P, {"x": [1]}, {"a": one}).union(of(P, {"y": [1]}, {"a": other})))


def union_metadata(P, one, other):
    return len(of(P, {"x": [1]}, (), {"a": one}).union(of(P, {"y": [1]}, (), {"a": other})))


def concat_metadata(P, one, other):
    return len(concat(P, ({"x": [1]}, (), {"a": one}), ({"x": [1]}, (), {"a": other})))


def shuffled(P, seed):
    return "".join(uids(part) for part in make(P, 8).make_iterator(4, 1, seed, {"shuffle": True}))


def one_randperm(P):
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    return shuffled(P, 1) == "".join("abcdefgh"[row] for row in order)


def saved_as_safetensors(P):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "batch")
        make(P).save_to_disk(path)
        return b'"__metadata__":{' in path.read_bytes()


def nan():
    return float("nan")  # each time another one: == between two is false


RECEIVER = "a batch changes only by item assignment and pop: whoever else holds it sees what he had"
ALIAS = "nothing but tensors is shared: a write into one batch must not turn up in another"
VIEW = "rows that follow each other are a view, without a copy"
SURVIVE = "what goes in comes out: dtype, device, type, one cell per row"
SILENT = "a call that cannot mean this is an error, not an answer"
WORKS = "there is one right answer, and it can be given"
NAN = "NaN in both is no conflict"
OBJECTS = "a batch of objects alone is a batch"
EMPTY = "zero rows, and rows of zero width, are legal everywhere"
JAGGED = "rows of any length are rows"
EXPLICIT = "padding is done where it can be seen, and says by how much"
BYTES = "uint8 is a mask to torch and numbers to numpy: here it is numbers"

# In this order: what to look at when moving code over comes first.
DIFFERENT = {
    # The receiver stays as it is
    "reorder": (lambda P: uids(after(make(P), lambda d: d.reorder(T([3, 2, 1, 0])))), "dcba", "abcd", RECEIVER),
    "reorder_answer": (lambda P: make(P).reorder(T([3, 2, 1, 0])) is None, True, False, RECEIVER),
    "padding": (lambda P: uids(after(make(P), lambda d: d.padding(1))), "abcdd", "abcd", RECEIVER),
    "padding_answer": (lambda P: make(P).padding(1) is None, True, False, RECEIVER),
    "union": (
        lambda P: names(after(of(P, {"a": [1]}), lambda d: d.union(of(P, {"b": [1]})))),
        ["a", "b"], ["a"], RECEIVER,
    ),
    "union_that_fails": (
        lambda P: names(after(of(P, {"a": [1]}, (), {"k": 1}), lambda d: d.union(of(P, {"b": [1]}, (), {"k": 2})))),
        ["a", "b"], ["a"], RECEIVER,
    ),
    "rename": (lambda P: names(after(of(P, {"a": [1]}), lambda d: d.rename("a", "b"))), ["b"], ["a"], RECEIVER),
    "to": (lambda P: (data := make(P)).to("cpu") is data, True, False, RECEIVER),
    "pop_that_fails": (lambda P: names(after(of(P, {"a": [1]}), lambda d: d.pop(["a"], ["b"]))), [], ["a"], RECEIVER),
    "fold": (lambda P: after(make(P), lambda d: P.fold_batch_dim(d, 2)).non_tensor_batch["uid"].ndim, 2, 1, RECEIVER),
    "unfold": (
        lambda P: after(P.fold_batch_dim(make(P), 2), P.unfold_batch_dim).batch.batch_size,
        (2, 2), (2,), RECEIVER,
    ),
    # Nothing but tensors is shared
    "callers_list": (callers_list, np.ndarray, list, ALIAS),
    "callers_metadata": (callers_metadata, {"k": 1}, {}, ALIAS),
    "callers_tensordict": (callers_tensordict, ["x", "y"], ["x"], ALIAS),
    "metadata_of_a_slice": (
        lambda P: len(after(make(P), lambda d: d[1:].meta_info.update(new=1)).meta_info),
        3, 2, ALIAS,
    ),
    "metadata_of_a_chunk": (
        lambda P: after(make(P), lambda d: d.chunk(2)[0].meta_info["notes"]["tags"].append("y")).meta_info["notes"],
        {"tags": ["x", "y"]}, {"tags": ["x"]}, ALIAS,
    ),
    "metadata_of_a_row": (lambda P: (data := make(P))[0].meta_info is data.meta_info, True, False, ALIAS),
    "objects_of_a_slice": (
        lambda P: uids(after(make(P), lambda d: d[1:].non_tensor_batch["uid"].fill("z"))), "azzz", "abcd", ALIAS,
    ),
    "select_everything": (lambda P: (data := make(P)).select().batch is data.batch, True, False, ALIAS),
    "select_deepcopy": (lambda P: shared(data := make(P), data.select(deepcopy=True)), True, False, ALIAS),
    "pad_by_nothing": (lambda P: P.pad_dataproto_to_divisor(data := make(P), 2)[0] is data, True, False, ALIAS),
    "unpad_by_nothing": (lambda P: P.unpad_dataproto(data := make(P), 0) is data, True, False, ALIAS),
    # Tensors are shared where rows follow each other
    "rows_that_follow": (lambda P: shared(data := make(P), data[[1, 2]]), False, True, VIEW),
    "repeat_once": (lambda P: shared(data := make(P), data.repeat(1)), False, True, VIEW),
    "repeat_of_one_row": (written_once, 3, 1, "rows of a repeat are copies, even of one row"),
    # What goes in comes out
    "iterator_dtype": (
        lambda P: next(make(P).make_iterator(2, 1)).non_tensor_batch["score"].dtype,
        object, float, SURVIVE,
    ),
    "even_lists": (lambda P: pair(P, [[1, 2], [3, 4]]), (2, 2), (2,), SURVIVE),
    "even_arrays": (lambda P: pair(P, [np.ones((3, 3)), np.ones((3, 3))]), (2, 3, 3), (2,), SURVIVE),
    "even_lists_in_a_tensordict": (
        lambda P: from_tensordict(
            P, x=T([1, 2]), pair=NonTensorStack(NonTensorData([1, 2]), NonTensorData([3, 4]))
        ).non_tensor_batch["pair"].shape,
        (2, 2), (2,), SURVIVE,
    ),
    "even_lists_in_an_iterator": (
        lambda P: next(of(P, {"x": [1, 2]}, {"a": [[1, 2], [3, 4]]}).make_iterator(2, 1)).non_tensor_batch["a"].shape,
        (2, 2), (2,), SURVIVE,
    ),
    "repeat_device": (lambda P: str(make(P).to("cpu").repeat(2).batch.device), "None", "cpu", SURVIVE),
    "pop_subclass": (lambda P: type(subclass(P).pop(["x"])) is P.DataProto, True, False, SURVIVE),
    "iterator_subclass": (lambda P: type(next(subclass(P).make_iterator(2, 1))) is P.DataProto, True, False, SURVIVE),
    "concat_of_two_dtypes": (
        lambda P: concat(P, ({"a": [1]},), ({"a": [0.5]},)).batch["a"].tolist(), [1.0, 0.5], ValueError, SURVIVE,
    ),
    "concat_of_numbers_and_strings": (
        lambda P: concat(P, ((), {"a": np.array([1])}), ((), {"a": np.array(["x"])})).non_tensor_batch["a"].tolist(),
        ["1", "x"], ValueError, SURVIVE,
    ),
    "metrics_that_are_lists": (
        lambda P: reports(P, {"loss": [1]}, {"loss": [2]})["metrics"],
        {"loss": [[1], [2]]}, {"loss": [1, 2]}, "concat of concats is one concat",
    ),
    "metrics_of_padding": (
        lambda P: P.pad_dataproto_to_divisor(of(P, {"x": [1]}, (), {"metrics": {"loss": 1}}), 2)[0]
        .meta_info["metrics"],
        {"loss": [1, 1]}, {"loss": 1}, "a padded row is no worker",
    ),
    # No answer where none is meant
    "floats_as_rows": (lambda P: uids(make(P)[[0.9, 2.7]]), "ac", ValueError, SILENT),
    "true_as_a_row": (lambda P: make(P)[True].batch["logp"].shape, (1, 4), ValueError, SILENT),
    "rows_in_two_dimensions": (lambda P: make(P)[T([[0, 1]])].batch["logp"].shape, (1, 2), ValueError, SILENT),
    "reorder_drops_rows": (lambda P: uids(changed(data := make(P), data.reorder(T([3, 3])))), "dd", ValueError, SILENT),
    "select_unknown_objects": (lambda P: names(make(P).select(["ids"], ["nope"])), ["ids"], KeyError, SILENT),
    "select_unknown_metadata": (lambda P: make(P).select(meta_info_keys=["nope"]).meta_info, {}, KeyError, SILENT),
    "unfold_unknown_columns": (lambda P: len(unfold_column_chunks(make(P), 2, ["nope"])), 8, KeyError, SILENT),
    "unfold_of_flat_columns": (lambda P: len(P.unfold_batch_dim(make(P))), 4, ValueError, SILENT),
    "rename_onto_another": (lambda P: names(of(P, {"a": [1], "b": [2]}).rename("a", "b")), ["b"], ValueError, SILENT),
    "union_of_two_dtypes": (lambda P: union_tensors(P, 1, 1.0), [1], ValueError, SILENT),
    "union_of_two_lengths": (
        lambda P: len(of(P, {"a": [1, 2]}).union(broken(of(P, {"b": [1, 2]}, {"uid": "xy"}))).non_tensor_batch["uid"]),
        1, ValueError, SILENT,
    ),
    "concat_drops_tensors": (
        lambda P: concat(P, ((), {"u": "a"}), ({"x": [1]}, {"u": "b"})).batch,
        None, ValueError, SILENT,
    ),
    "objects_of_two_lengths": (lambda P: len(of(P, (), {"a": "x", "b": "yz"})), 1, ValueError, SILENT),
    "one_name_in_two_parts": (lambda P: len(of(P, {"a": [1]}, {"a": "x"})), 1, ValueError, SILENT),
    "array_without_rows": (lambda P: of(P, (), {"a": np.array(1.0)}).non_tensor_batch["a"].ndim, 0, ValueError, SILENT),
    "numpy_among_tensors": (
        lambda P: P.DataProto.from_dict({"a": np.zeros(2)}).batch["a"].tolist(), [0.0, 0.0], ValueError, SILENT,
    ),
    "metadata_from_two_places": (
        lambda P: P.DataProto.from_tensordict(TensorDict({"x": T([1]), "k": NonTensorData(2)}, [1]), {"k": 1})
        .meta_info,
        {"k": 2}, ValueError, SILENT,
    ),
    "split_negative": (lambda P: make(P).split(-1), [], ValueError, SILENT),
    "pad_negative": (lambda P: P.pad_dataproto_to_divisor(make(P, 3), -2)[1], -1, ValueError, SILENT),
    "unpad_too_many": (lambda P: len(P.unpad_dataproto(make(P), 9)), 0, ValueError, SILENT),
    "unpad_negative": (lambda P: uids(P.unpad_dataproto(make(P), -1)), "a", ValueError, SILENT),
    "padding_middle": (
        lambda P: uids(changed(data := make(P), data.padding(1, "middle"))),
        "abcdd", ValueError, SILENT,
    ),
    # An answer where verl has none
    "range": (lambda P: uids(make(P)[range(2)]), TypeError, "ab", WORKS),
    "row_tensor": (lambda P: make(P)[T(1)].non_tensor_batch["uid"], IndexError, "b", WORKS),
    "negative_step": (lambda P: uids(make(P)[::-1]), ValueError, "dcba", WORKS),
    "byte_array": (lambda P: uids(make(P)[np.array([3, 1], dtype=np.uint8)]), IndexError, "db", BYTES),
    "byte_tensor": (lambda P: uids(make(P)[T([3, 1], dtype=torch.uint8)]), IndexError, "db", BYTES),
    "empty_array": (lambda P: len(make(P)[np.array([])]), IndexError, 0, "numpy's array of nothing is one of floats"),
    "reorder_list": (lambda P: uids(changed(d := make(P), d.reorder([1, 0, 2, 3]))), AttributeError, "bacd", WORKS),
    "sample_level_repeat_mask": (
        lambda P: uids(make(P, 2).sample_level_repeat([True, False])), NotImplementedError, "a", WORKS,
    ),
    "select_one_name": (lambda P: names(make(P).select("ids", [])), KeyError, ["ids"], "a name is not its letters"),
    "rename_several": (
        lambda P: names(of(P, {"a": [1], "b": [2]}).rename(["a", "b"], ["c", "d"])),
        ValueError, ["c", "d"], WORKS,
    ),
    "rename_objects": (lambda P: uids(of(P, {"x": [1]}, {"id": "a"}).rename("id", "uid")), KeyError, "a", WORKS),
    "rename_tuples": (lambda P: names(of(P, {"a": [1]}).rename(("a",), ("b",))), TypeError, ["b"], WORKS),
    "union_nan": (lambda P: len(of(P, {"a": [nan()]}).union(of(P, {"a": [nan()]}))), AssertionError, 1, NAN),
    "union_nan_in_cells": (lambda P: union_cells(P, [[nan()]], [[nan()]]), AssertionError, 1, NAN),
    "union_nan_in_metadata": (lambda P: union_metadata(P, nan(), nan()), AssertionError, 1, NAN),
    "union_arrays_in_metadata": (lambda P: union_metadata(P, np.ones(2), np.ones(2)), ValueError, 1, WORKS),
    "union_tensors_in_cells": (lambda P: union_cells(P, [T([1, 2])], [T([1, 2])]), RuntimeError, 1, WORKS),
    "union_one_and_one": (
        lambda P: union_cells(P, [1], [1.0]),
        AssertionError, 1, "cells are equal where Python says so",
    ),
    "union_string_widths": (
        lambda P: union_cells(P, np.array(["x"]), np.array(["x"], "U5")), AssertionError, 1, "a width is no value",
    ),
    "union_without_tensors": (
        lambda P: names(of(P, {"x": [1]}).union(objects(P, "a"))),
        AttributeError, ["uid", "x"], OBJECTS,
    ),
    "concat_arrays_in_metadata": (lambda P: concat_metadata(P, np.ones(2), np.ones(2)), ValueError, 2, WORKS),
    "concat_nan_in_metadata": (lambda P: concat_metadata(P, nan(), nan()), AssertionError, 2, NAN),
    "metrics_of_unlike_workers": (
        lambda P: reports(P, {"loss": 1.0}, {"kl": 2.0})["metrics"], AssertionError, {"loss": [1.0], "kl": [2.0]},
        "what only some workers measure stays",
    ),
    "unfold_no_keys": (lambda P: uids(unfold_column_chunks(make(P, 2), 2)), TypeError, "aabb", WORKS),
    "unfold_lists_in_cells": (
        lambda P: list(unfold_column_chunks(of(P, (), {"a": [[1, 2], [3, 4, 5, 6]]}), 2, ["a"]).non_tensor_batch["a"]),
        IndexError, [[1], [2], [3, 4], [5, 6]], WORKS,
    ),
    "chunk_of_no_rows": (lambda P: len(make(P, 0).chunk(2)), RuntimeError, 2, EMPTY),
    "sample_level_repeat_of_no_rows": (
        lambda P: len(make(P, 0).sample_level_repeat([])), NotImplementedError, 0, EMPTY,
    ),
    "repeat_of_no_width": (lambda P: len(of(P, {"x": [[], []]}).repeat(2, False)), RuntimeError, 4, EMPTY),
    "fold_of_no_rows": (lambda P: P.fold_batch_dim(make(P, 0), 1).batch["ids"].shape, RuntimeError, (1, 0, 4), EMPTY),
    "reorder_objects": (lambda P: uids(changed(d := objects(P), d.reorder(T([1, 0])))), TypeError, "ba", OBJECTS),
    "iterator_objects": (
        lambda P: [uids(p) for p in objects(P).make_iterator(1, 1)],
        AttributeError, ["a", "b"], OBJECTS,
    ),
    "fold_objects": (
        lambda P: P.fold_batch_dim(objects(P), 1).non_tensor_batch["uid"].ndim,
        AttributeError, 2, OBJECTS,
    ),
    "to_tensordict_objects": (lambda P: len(objects(P).to_tensordict()), AttributeError, 2, OBJECTS),
    "from_tensordict_objects": (
        lambda P: uids(from_tensordict(P, uid=NonTensorStack("a", "b"))), AssertionError, "ab", OBJECTS,
    ),
    "info_of_objects": (lambda P: "uid" in objects(P).get_data_info(), AttributeError, True, OBJECTS),
    "constructor_dict": (lambda P: len(P.DataProto({"x": T([1, 2])})), AttributeError, 2, WORKS),
    "constructor_list": (lambda P: len(P.DataProto(non_tensor_batch={"uid": ["a", "b"]})), AssertionError, 2, WORKS),
    "from_single_dict_list": (lambda P: len(P.DataProto.from_single_dict({"uid": ["a", "b"]})), ValueError, 2, WORKS),
    "field": (lambda P: make(P)["uid"].tolist(), TypeError, ["a", "b", "c", "d"], WORKS),
    "field_of_a_row": (lambda P: make(P)[0]["uid"], TypeError, "a", WORKS),
    "name_in_batch": (lambda P: "uid" in make(P), False, True, "verl looks for a row that equals the name"),
    "equality": (lambda P: make(P) == make(P), RuntimeError, False, "a batch equals itself; compare columns"),
    "hash": (lambda P: len({make(P)}), TypeError, 1, "a batch equals itself"),
    # Jagged columns
    "jagged_slice": (lambda P: len(jagged(P, 1, 2, 3)[1:]), RuntimeError, 2, JAGGED),
    "jagged_rows": (
        lambda P: jagged(P, 1, 2)[[1, 0]][0].batch["tokens"].tolist(),
        NotImplementedError, [0.0, 1.0], JAGGED,
    ),
    "jagged_reorder": (
        lambda P: len(changed(d := jagged(P, 1, 2), d.reorder(T([1, 0])))),
        NotImplementedError, 2, JAGGED,
    ),
    "jagged_repeat": (lambda P: len(jagged(P, 1, 2).repeat(2)), RuntimeError, 4, JAGGED),
    "jagged_sample_level_repeat": (
        lambda P: len(jagged(P, 1, 2).sample_level_repeat([2, 1])),
        NotImplementedError, 3, JAGGED,
    ),
    "jagged_concat": (lambda P: len(P.DataProto.concat([jagged(P, 1, 2), jagged(P, 3)])), RuntimeError, 3, JAGGED),
    "jagged_pad": (lambda P: len(P.pad_dataproto_to_divisor(jagged(P, 1, 2, 3), 2)[0]), RuntimeError, 4, JAGGED),
    "jagged_union": (lambda P: len(jagged(P, 1, 2).union(jagged(P, 1, 2))), RuntimeError, 2, JAGGED),
    # Another way
    "automatic_padding": (
        lambda P: len(P.DataProto.from_dict({"x": T([1])}, auto_padding=True)),
        1, ValueError, EXPLICIT,
    ),
    "uneven_chunks": (
        lambda P: [len(part) for part in of(P, {"x": [1, 2, 3]}, (), {"_verl_auto_padding": True}).chunk(2)],
        [2, 1], ValueError, EXPLICIT,
    ),
    "is_padding_enabled": (lambda P: make(P).is_padding_enabled(), False, AttributeError, EXPLICIT),
    "shuffled_order": (one_randperm, False, True, "the order of a seed is one randperm of it"),
    "shuffled_without_a_seed": (
        lambda P: shuffled(P, None) == shuffled(P, None), False, True, "an order never depends on what ran before",
    ),
    "loader_options": (
        lambda P: len(list(make(P).make_iterator(2, 1, dataloader_kwargs={"num_workers": 0}))), 2, ValueError,
        "there is no loader here, so its options would do nothing",
    ),
    "save_to_disk": (saved_as_safetensors, False, True, "no pickle on disk: reading a file runs no code of it"),
    "print_size": (lambda P: type(make(P).print_size()), type(None), str, "a library does not print"),
}  # fmt: skip


@pytest.mark.parametrize("case", [Difference(*case) for case in DIFFERENT.values()], ids=DIFFERENT)
def test_another_answer_for_a_reason(case):
    assert case.verl != case.ours
    assert case.why
    check(case.call, verls(), case.verl)
    check(case.call, ours(), case.ours)


def check(call, P, expected):
    if isinstance(expected, type) and issubclass(expected, Exception):
        with pytest.raises(expected):
            call(P)
    else:
        answer = call(P)
        assert answer is expected if expected is None else answer == expected
