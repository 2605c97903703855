"""Calls that this library's DataProto and verl's answer alike, and calls that both refuse."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.peers.beside import (
    broken,
    cells,
    changed,
    concat,
    jagged,
    make,
    objects,
    of,
    ours,
    plain,
    reports,
    uids,
    unfold_column_chunks,
    verls,
)

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # the warnings of verl, Ray and tensordict
T = torch.tensor


def popped(P, *keys):
    data = make(P)
    return [data.pop(*keys), data]


def fields(tensordict):
    return {name: tensordict[name] for name in tensordict.keys()}  # noqa: SIM118


def through_tensordict(data):
    return type(data).from_tensordict(data.to_tensordict())


def through_pickle(data):
    return pickle.loads(pickle.dumps(data))  # noqa: S301


def with_nan(P, name):
    return of(P, {name: [1]}, {"a": [float("nan")]})


def drawn(P):
    """What torch's own generator gives after a seeded iterator."""
    torch.manual_seed(0)
    rows = len(list(make(P).make_iterator(2, 1, seed=3)))
    return [rows, float(torch.rand(1))]


METADATA = {"list": [1, 2], "none": None, "empty": [], "dict": {"a": {"b": [0.5]}}, "tuple": (1, "x")}
SAME = {
    # Construction and length
    "from_dict": make,
    "from_dict_objects": objects,
    "from_dict_uneven_lists": lambda P: P.DataProto.from_dict(non_tensors={"turns": [[1], [2, 3]]}),
    "from_dict_zero_rows": lambda P: make(P, 0),
    "from_single_dict": lambda P: P.DataProto.from_single_dict({"x": T([1, 2]), "y": np.array([1.0, 2.0])}, {"k": 1}),
    "constructor": lambda P: P.DataProto(TensorDict({"x": T([1, 2])}, [2]), {"uid": cells("a", "b")}, {"k": 1}),
    "constructor_keywords": lambda P: P.DataProto(batch=None, non_tensor_batch={"uid": cells("a")}, meta_info={}),
    "constructor_jagged": lambda P: jagged(P, 1, 0, 2),
    "length": lambda P: [len(make(P, rows)) for rows in (0, 1, 4)],
    "length_of_objects": lambda P: len(objects(P)),
    "length_of_nothing": lambda P: [len(P.DataProto()), len(P.DataProto(None, None, {"k": 1}))],
    "truth": lambda P: [bool(make(P, 0)), bool(make(P, 1))],
    # Rows
    "row": lambda P: [make(P)[1], make(P)[-1], make(P)[np.int64(2)]],
    "row_of_objects": lambda P: objects(P)[1],
    "every_row": lambda P: list(make(P)),
    "slice": lambda P: [make(P)[1:3], make(P)[:2], make(P)[2:], make(P)[:]],
    "slice_step": lambda P: make(P)[::2],
    "slice_negative": lambda P: make(P)[-3:-1],
    "slice_beyond": lambda P: [make(P)[3:99], make(P)[9:]],
    "slice_method": lambda P: [make(P).slice(1, 3), make(P).slice(end=-1), make(P).slice(0, 4, 3)],
    "list": lambda P: [make(P)[[2, 0, 0, -1]], make(P)[[]]],
    "array": lambda P: make(P)[np.array([3, 1])],
    "tensor": lambda P: make(P)[T([3, 1])],
    "mask_list": lambda P: make(P)[[True, False, True, False]],
    "mask_array": lambda P: make(P)[np.array([False, True, True, False])],
    "mask_tensor": lambda P: [make(P)[T([False] * 4)], make(P)[T([True, False, False, True])]],
    "mask_numpy_bools": lambda P: make(P)[[np.bool_(True), np.bool_(False)] * 2],
    "select_idxs": lambda P: make(P).select_idxs(T([1, 1, 0])),
    "select_idxs_objects": lambda P: objects(P).select_idxs([1, 1, 0]),
    "reorder": lambda P: changed(data := make(P), data.reorder(T([3, 0, 2, 1]))),
    "repeat": lambda P: [make(P).repeat(), make(P).repeat(3, interleave=False), make(P).repeat(repeat_times=0)],
    "repeat_objects": lambda P: objects(P).repeat(2, False),
    "sample_level_repeat": lambda P: [make(P).sample_level_repeat(times) for times in ([1, 0, 2, 1], (0,) * 4)],
    "sample_level_repeat_kinds": lambda P: [make(P, 2).sample_level_repeat(kind([2, 1])) for kind in (np.array, T)],
    "sample_level_repeat_objects": lambda P: objects(P).sample_level_repeat([2, 1]),
    # Fields
    "select": lambda P: make(P).select(["ids"], ["uid"], ["step"]),
    "select_all": lambda P: make(P).select(),
    "select_none": lambda P: make(P).select([], [], []),
    "select_deepcopy": lambda P: make(P).select(["ids"], deepcopy=True),
    "pop": lambda P: popped(P, ["ids"], ["uid"], ["step"]),
    "pop_tensors": lambda P: popped(P, ["ids", "logp"]),
    "pop_objects": lambda P: popped(P, None, ["uid"]),
    "pop_everything": lambda P: popped(P, ["ids", "logp", "mask"], ["uid", "score", "turns"], ["step", "notes"]),
    "rename": lambda P: [make(P).rename("ids", "x"), make(P).rename(["ids"], ["x"])],
    "union": lambda P: make(P, 2).union(of(P, {"values": [0.5, 1.0]}, {"tag": "xy"}, {"more": [1]})),
    "union_of_equals": lambda P: make(P).union(make(P)),
    "union_nan_cells": lambda P: with_nan(P, "x").union(with_nan(P, "y")),
    "to": lambda P: [make(P).to("cpu"), objects(P).to("cpu")],
    # Parts
    "chunk": lambda P: [make(P).chunk(1), make(P).chunk(2), make(P).chunk(4)],
    "chunk_objects": lambda P: objects(P, "abcd").chunk(2),
    "chunk_jagged": lambda P: [len(part) for part in jagged(P, 1, 2, 3, 4).chunk(2)],
    "split": lambda P: [make(P).split(3), make(P).split(9), make(P, 0).split(2)],
    "concat": lambda P: P.DataProto.concat([make(P, 3), make(P, 0), make(P, 2)]),
    "concat_one": lambda P: P.DataProto.concat([make(P)]),
    "concat_objects": lambda P: P.DataProto.concat([objects(P), objects(P, "c")]),
    "concat_chunks": lambda P: P.DataProto.concat(make(P).chunk(2)),
    "concat_metadata": lambda P: concat(P, ({"x": [1]}, (), {"a": 1}), ({"x": [2]}, (), {"b": 2}), ({"x": [3]},)),
    "concat_string_widths": lambda P: concat(P, ((), {"s": np.array(["a"])}), ((), {"s": np.array(["bcd"])})),
    "iterator": lambda P: [uids(part) for part in make(P).make_iterator(2, epochs=2)],
    "iterator_parts": lambda P: list(make(P).select(non_tensor_batch_keys=["uid"]).make_iterator(2, 1)),
    "iterator_seed_without_shuffle": lambda P: [uids(part) for part in make(P).make_iterator(2, 1, seed=5)],
    "iterator_zero_rows": lambda P: list(make(P, 0).make_iterator(2, 1)),
    "iterator_leaves_the_generator": drawn,
    # Padding
    "pad": lambda P: [P.pad_dataproto_to_divisor(make(P, 3), divisor) for divisor in (1, 2, 3, 4, 7)],
    "pad_zero_rows": lambda P: P.pad_dataproto_to_divisor(make(P, 0), 4),
    "unpad": lambda P: [P.unpad_dataproto(make(P), rows) for rows in (0, 1, 4)],
    "padding": lambda P: [changed(data := make(P, 3), data.padding(2, which)) for which in ("first", "last")],
    "padding_default": lambda P: changed(data := make(P, 3), data.padding(1)),
    "padding_nothing": lambda P: changed(data := make(P, 0), data.padding(0)),
    # The shape of rows
    "fold": lambda P: [P.fold_batch_dim(make(P), rows) for rows in (1, 2, 4)],
    "unfold": lambda P: P.unfold_batch_dim(P.fold_batch_dim(make(P), 2)),
    "unfold_column_chunks": lambda P: unfold_column_chunks(make(P), 2, ["ids", "mask"]),
    "unfold_column_chunks_arrays": lambda P: unfold_column_chunks(
        of(P, {"x": [1, 2]}, {"n": np.arange(8).reshape(2, 4), "uid": "ab"}), 2, ["n"]
    ),
    "unfold_column_chunks_no_key": lambda P: unfold_column_chunks(make(P), 2, []),
    # Other containers
    "to_tensordict": lambda P: fields(make(P).to_tensordict()),
    "from_tensordict": lambda P: P.DataProto.from_tensordict(
        TensorDict({"x": T([1, 2]), "uid": NonTensorStack("a", "b"), "step": NonTensorData(3)}, [2]), {"more": 4}
    ),
    "through_tensordict": lambda P: through_tensordict(make(P)),
    "through_tensordict_metadata": lambda P: through_tensordict(of(P, {"x": [1, 2]}, {"uid": "ab"}, METADATA)),
    "through_tensordict_jagged": lambda P: through_tensordict(jagged(P, 1, 3)),
    "pickle": lambda P: [through_pickle(make(P, rows)) for rows in (0, 3)],
    "pickle_objects": lambda P: through_pickle(objects(P)),
    "pickle_jagged": lambda P: through_pickle(jagged(P, 1, 3)),
    "pickle_of_a_graph": lambda P: through_pickle(of(P, {"x": T([1.0], requires_grad=True) * 2})),
    "pickle_drops_the_graph": lambda P: (
        through_pickle(of(P, {"x": T([1.0], requires_grad=True) * 2})).batch["x"].requires_grad
    ),
    # What workers report
    "metrics": lambda P: reports(P, {"loss": 1.0}, {"loss": 2.0}),
    "metrics_lists": lambda P: reports(P, [{"loss": 1.0}, {"loss": 2.0}], [{"loss": 3.0}]),
    "metrics_mixed": lambda P: reports(P, {"loss": 1.0}, [{"loss": 2.0}, {"loss": 3.0}]),
    "metrics_of_one": lambda P: reports(P, None, {"loss": 2.0}),
    "metrics_of_none": lambda P: [reports(P, None, None), reports(P, [], []), reports(P, {}, {})],
}  # fmt: skip

# With verl's error where it is meant: whoever catches it catches this library's too. Where verl fails further down, in
# torch or tensordict, it is None, and only this library's own kind of error is promised.
REFUSED = {
    "row": (lambda P: make(P)[4], IndexError),
    "rows": (lambda P: make(P)[[0, -5]], IndexError),
    "tuple": (lambda P: make(P)[(0, 1)], None),
    "nothing": (lambda P: make(P)[None], None),
    "mask_length": (lambda P: make(P)[[True, False]], None),
    "step_zero": (lambda P: make(P)[::0], ValueError),
    "lengths": (lambda P: of(P, {"a": [1, 2], "b": [1]}), AssertionError),
    "lengths_objects": (lambda P: of(P, {"a": [1, 2]}, {"b": "x"}), AssertionError),
    "scalar": (lambda P: of(P, {"a": 1}), AssertionError),
    "batch_dims": (lambda P: P.DataProto.from_dict({"a": torch.zeros(2, 3)}, num_batch_dims=2), AssertionError),
    "two_batch_dims": (lambda P: P.DataProto(TensorDict({"a": torch.zeros(2, 3)}, [2, 3])), AssertionError),
    "other_type": (lambda P: P.DataProto.from_single_dict({"a": "text"}), ValueError),
    "list_as_tensor": (lambda P: P.DataProto.from_dict({"a": [1, 2]}), None),
    "select": (lambda P: make(P).select(["nope"]), KeyError),
    "pop": (lambda P: make(P).pop(["nope"]), AssertionError),
    "pop_objects": (lambda P: make(P).pop(non_tensor_batch_keys=["nope"]), AssertionError),
    "rename": (lambda P: make(P).rename("nope", "x"), KeyError),
    "rename_pairs": (lambda P: make(P).rename(["ids", "logp"], ["x"]), ValueError),
    "union": (lambda P: of(P, {"a": [1]}).union(of(P, {"a": [2]})), AssertionError),
    "union_objects": (lambda P: of(P, {"x": [1]}, {"u": "a"}).union(of(P, {"y": [1]}, {"u": "b"})), AssertionError),
    "union_metadata": (
        lambda P: of(P, {"x": [1]}, (), {"k": 1}).union(of(P, {"y": [1]}, (), {"k": 2})),
        AssertionError,
    ),
    "union_rows": (lambda P: make(P).union(of(P, {"x": [1]})), AssertionError),
    "concat_nothing": (lambda P: P.DataProto.concat([]), None),
    "concat_tensors": (lambda P: concat(P, ({"a": [1]},), ({"b": [1]},)), None),
    "concat_objects": (lambda P: concat(P, ({"a": [1]},), ({"a": [1]}, {"u": "x"})), AssertionError),
    "concat_shapes": (lambda P: concat(P, ({"a": [[1]]},), ({"a": [[1, 2]]},)), None),
    "concat_metadata": (lambda P: concat(P, ((), (), {"k": 1}), ((), (), {"k": 2})), AssertionError),
    "metrics": (lambda P: reports(P, 1, 2), None),
    "chunk": (lambda P: make(P).chunk(3), AssertionError),
    "chunk_negative": (lambda P: make(P).chunk(-2), ValueError),
    "chunk_zero": (lambda P: make(P).chunk(0), None),
    "split_zero": (lambda P: make(P).split(0), ValueError),
    "repeat": (lambda P: make(P).repeat(-1), None),
    "sample_level_repeat": (lambda P: make(P).sample_level_repeat([1, 2]), None),
    "sample_level_repeat_negative": (lambda P: make(P, 2).sample_level_repeat([1, -1]), None),
    "sample_level_repeat_dims": (lambda P: make(P, 2).sample_level_repeat(T([[1, 1]])), AssertionError),
    "sample_level_repeat_dict": (lambda P: make(P, 2).sample_level_repeat({0: 1}), AssertionError),
    "iterator": (lambda P: make(P).make_iterator(3, 1), AssertionError),
    "fold": (lambda P: P.fold_batch_dim(make(P), 3), AssertionError),
    "unfold_column_chunks": (lambda P: unfold_column_chunks(make(P), 3, ["ids"]), None),
    "unfold_column_chunks_flat": (lambda P: unfold_column_chunks(make(P), 2, ["logp"]), None),
    "pad_zero": (lambda P: P.pad_dataproto_to_divisor(make(P), 0), None),
    "padding_of_no_rows": (lambda P: make(P, 0).padding(1), None),
    "padding_negative": (lambda P: make(P).padding(-1), None),
    "check_consistency": (lambda P: broken(make(P)).check_consistency(), AssertionError),
    "tensordict_of_no_rows": (lambda P: make(P, 0).to_tensordict(), None),  # tensordict 0.10 has no such column
}  # fmt: skip


@pytest.mark.parametrize("call", SAME.values(), ids=SAME)
def test_the_same_answer(call):
    assert plain(call(ours())) == plain(call(verls()))


@pytest.mark.parametrize(("call", "kind"), REFUSED.values(), ids=REFUSED)
def test_data_proto_refuses_what_verl_refuses(call, kind):
    with pytest.raises(kind or Exception):
        call(verls())
    with pytest.raises(ValueError, match=r"\w") as caught:
        call(ours())
    assert kind is None or isinstance(caught.value, kind)
