"""Any sequence of calls on both containers at once, the bridge between them after each, and verl's own test suite."""

import importlib.metadata
import importlib.util
import inspect
import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlprims.interop.verl import DataProto, from_verl, to_verl
from tests.peers.beside import cells, changed, make, ours, plain, uids, unfold_column_chunks, verls

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # the warnings of verl, Ray and tensordict
MOST_ROWS = 12
small = st.integers(0, 3)

# Hypothesis makes a batch for both containers.

dtypes = st.sampled_from([torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.bool])
shapes = st.lists(st.integers(0, 4), max_size=2)
values = st.none() | st.integers(-9, 9) | st.text(max_size=3) | st.dictionaries(st.text(max_size=2), small, max_size=2)
metadata = st.dictionaries(st.sampled_from("klm"), small | st.text(max_size=3) | st.lists(small, max_size=3))


@st.composite
def batches(draw):
    """What from_dict takes. At least one tensor, for verl has few methods without one; and no jagged one."""
    rows = draw(st.integers(0, 6))
    tensors, arrays = {}, {}
    for name in ["ids", *draw(st.lists(st.sampled_from(["logp", "mask", "values"]), unique=True))]:
        size = (rows, *draw(shapes))
        numbers = torch.randint(-9, 9, size, generator=torch.Generator().manual_seed(draw(small)))
        tensors[name] = numbers.to(draw(dtypes))
    for name in draw(st.lists(st.sampled_from(["uid", "tag", "score"]), unique=True)):
        if draw(st.booleans()):
            arrays[name] = cells(*draw(st.lists(values, min_size=rows, max_size=rows)))
        else:
            arrays[name] = np.arange(rows * 2).reshape(rows, 2).astype(draw(st.sampled_from(["f4", "f8", "i8", "U4"])))
    return tensors, arrays, draw(metadata)


def built(P, batch):
    tensors, arrays, meta = batch
    return P.DataProto.from_dict(
        {name: tensor.clone() for name, tensor in tensors.items()},
        {name: array.copy() for name, array in arrays.items()},
        {key: value.copy() if isinstance(value, list) else value for key, value in meta.items()},
    )


# Each step draws its arguments once, and is then a function of P and a batch for both. None where it does not apply.


def cut(draw, data):
    bounds = slice(*draw(st.tuples(*[st.none() | st.integers(-8, 8)] * 2, st.sampled_from([None, 1, 2]))))
    return lambda P, d: d[bounds]


def gather(draw, data):
    rows = draw(st.lists(st.integers(-len(data), len(data) - 1), max_size=6)) if len(data) else []
    kind = draw(st.sampled_from([list, lambda x: np.array(x, dtype=np.int64), lambda x: torch.tensor(x).long()]))
    return lambda P, d: d[kind(rows)]


def mask(draw, data):
    mask = draw(st.lists(st.booleans(), min_size=len(data), max_size=len(data)))
    kind = draw(st.sampled_from([lambda x: np.array(x, dtype=bool), lambda x: torch.tensor(x).bool()]))
    return lambda P, d: d[kind(mask)]


def reorder(draw, data):
    order = torch.tensor(draw(st.permutations(range(len(data))))).long()
    return lambda P, d: changed(d, d.reorder(order))


def repeat(draw, data):
    times, interleave = draw(st.integers(0, min(3, MOST_ROWS // max(len(data), 1)))), draw(st.booleans())
    wide = all(0 not in tensor.shape[1:] for tensor in data.batch.values())
    return (lambda P, d: d.repeat(times, interleave)) if interleave or wide else None


def sample_level_repeat(draw, data):
    times = draw(st.lists(st.integers(0, 2), min_size=len(data), max_size=len(data)))
    return (lambda P, d: d.sample_level_repeat(torch.tensor(times))[:MOST_ROWS]) if len(data) else None


def chunk_and_concat(draw, data):
    count = draw(st.sampled_from([n for n in range(1, 7) if len(data) % n == 0]))
    order = draw(st.permutations(range(count)))
    if len(data):
        return lambda P, d: P.DataProto.concat([d.chunk(count)[position] for position in order])


def split(draw, data):
    size = draw(st.integers(1, 4))
    return (lambda P, d: d.split(size)[-1]) if len(data) else None


def pad(draw, data):
    divisor = draw(st.integers(1, 5))
    return lambda P, d: P.pad_dataproto_to_divisor(d, divisor)[0]


def unpad(draw, data):
    rows = draw(st.integers(0, len(data)))
    return lambda P, d: P.unpad_dataproto(d, rows)


def padding(draw, data):
    rows, which = draw(st.integers(1, 3)), draw(st.sampled_from(["first", "last"]))
    return (lambda P, d: changed(d, d.padding(rows, which))) if len(data) else None


def select(draw, data):
    keep = st.sampled_from(sorted(data.non_tensor_batch)) if data.non_tensor_batch else st.nothing()
    tensors = draw(st.lists(st.sampled_from(sorted(data.batch.keys())), min_size=1, unique=True))
    arrays = draw(st.none() | st.lists(keep, unique=True))
    return lambda P, d: d.select(tensors, arrays)


def pop_and_unite(draw, data):
    tensors = draw(st.lists(st.sampled_from(sorted(data.batch.keys())), min_size=1, unique=True))

    def step(P, d):
        taken = d.pop(tensors, list(d.non_tensor_batch))
        return taken.union(d)

    return step if len(tensors) < len(list(data.batch.keys())) else None


def rename(draw, data):
    old = draw(st.sampled_from(sorted(data.batch.keys())))
    return lambda P, d: d.rename(old, "renamed").rename("renamed", old)


def unite(draw, data):
    other = torch.full((len(data),), 5)  # the same each time, so that a later one agrees with an earlier one
    return lambda P, d: d.union(P.DataProto.from_dict({"other": other.clone()}))


def fold_and_unfold(draw, data):
    rows = draw(st.sampled_from([n for n in range(1, 7) if len(data) % n == 0]))
    wide = all(tensor.numel() for tensor in data.batch.values())  # torch infers no size of a dimension of nothing
    return (lambda P, d: P.unfold_batch_dim(P.fold_batch_dim(d, rows))) if len(data) and wide else None


def unfold_columns(draw, data):
    parts = draw(st.integers(1, 2))
    keys = [name for name, tensor in data.batch.items() if tensor.ndim > 1 and tensor.shape[1] % parts == 0]
    return lambda P, d: unfold_column_chunks(d, parts, keys)[:MOST_ROWS]


def iterate(draw, data):
    size = draw(st.sampled_from([n for n in range(1, 7) if len(data) % n == 0]))
    kept = [name for name, array in data.non_tensor_batch.items() if array.dtype == object]
    if len(data):
        return lambda P, d: P.DataProto.concat(list(d.select(non_tensor_batch_keys=kept).make_iterator(size, 1)))


def through_tensordict(draw, data):
    if len(data) and all(array.ndim == 1 for array in data.non_tensor_batch.values()):
        return lambda P, d: P.DataProto.from_tensordict(d.to_tensordict())


def through_pickle(draw, data):
    return lambda P, d: pickle.loads(pickle.dumps(d))  # noqa: S301


STEPS = (
    cut,
    gather,
    mask,
    reorder,
    repeat,
    sample_level_repeat,
    chunk_and_concat,
    split,
    pad,
    unpad,
    padding,
    select,
    pop_and_unite,
    rename,
    unite,
    fold_and_unfold,
    unfold_columns,
    iterate,
    through_tensordict,
    through_pickle,
)


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_sequence_of_calls(data):
    batch = data.draw(batches())
    mine, theirs = built(ours(), batch), built(verls(), batch)
    for step in data.draw(st.lists(st.sampled_from(STEPS), max_size=8)):
        call = step(data.draw, mine)
        if call is not None:
            mine, theirs = call(ours(), mine), call(verls(), theirs)
        assert plain(mine) == plain(theirs)
        assert plain(to_verl(mine)) == plain(theirs)
        assert plain(from_verl(theirs)) == plain(mine)


# The bridge


def rich():
    jagged = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.jagged)
    return DataProto.from_dict(
        {"ids": torch.arange(4).view(2, 2), "tokens": jagged, "grad": torch.ones(2, requires_grad=True)},
        {"turns": [[1, 2], [3, 4]], "image": [np.zeros((2, 2)), np.ones((2, 2))], "score": np.array([0.5, 1.0])},
        {"step": 1, "notes": {"tags": ["x"]}, "array": np.ones(2)},
    )


@pytest.mark.parametrize(
    "data",
    [
        rich,
        lambda: make(ours()),
        lambda: make(ours(), 0),
        lambda: rich()[:0],
        lambda: rich()[[1, 0]],
        lambda: DataProto(),
        lambda: DataProto(meta_info={"k": 1}),
        lambda: DataProto.from_dict(non_tensors={"uid": ["a"]}),
        lambda: make(ours()).select([], []),
    ],
    ids=["rich", "plain", "no_rows", "no_rows_rich", "gathered", "nothing", "metadata", "objects", "no_fields"],
)
def test_there_and_back(data):
    data = data()
    theirs = to_verl(data)
    assert type(theirs) is verls().DataProto
    assert len(theirs) == len(data)
    theirs.check_consistency()
    back = from_verl(theirs)
    assert plain(back) == plain(theirs) == plain(data)
    for name, tensor in data.batch.items() if data.batch is not None else ():
        assert theirs.batch[name] is tensor
        assert back.batch[name] is tensor


def test_to_verl_shares_no_changes_with_the_original():
    data = make(ours())
    theirs = to_verl(data)
    theirs.reorder(torch.tensor([3, 2, 1, 0]))
    theirs.union(verls().DataProto.from_dict({"new": torch.zeros(4)}, meta_info={"more": 1}))
    theirs.rename("ids", "input_ids")
    theirs.pop(["logp"], ["uid"], ["step"])
    theirs.padding(1)
    assert plain(data) == plain(make(ours()))


def test_a_write_into_a_tensor_is_seen_on_both_sides():
    data = make(ours())
    to_verl(data).batch["ids"][0] = 7
    from_verl(to_verl(data)).batch["ids"][1] = 8
    assert data["ids"][:2].tolist() == [[7] * 4, [8] * 4]


@pytest.mark.parametrize("method", ["default", "numpy"])
def test_through_verls_own_pickling(monkeypatch, method):
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", method)
    data = make(ours()) if method == "default" else rich()
    back = from_verl(pickle.loads(pickle.dumps(to_verl(data))))  # noqa: S301
    assert plain(back) == plain(data)


def test_the_tensordicts_of_verls_newer_trainer():
    tu = importlib.import_module("verl.utils.tensordict_utils")
    tokens = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    td = tu.get_tensordict({"input_ids": tokens, "turns": [[1, 2], [3, 4]], "uid": ["a", "b"]}, {"temperature": 1.0})
    data = DataProto.from_tensordict(td)
    assert data["turns"].tolist() == [[1, 2], [3, 4]]
    assert uids(data[[1, 0]]) == "ba"
    assert data["temperature"] == 1.0
    again = data[[1, 0]].to_tensordict()
    assert tu.get(again, "uid") == ["b", "a"]
    assert [row.tolist() for row in again["input_ids"].unbind()] == [[0, 1, 2], [0, 1]]


# verl's own tests, which its package brings along, with this container in place of verl's. Those that fail, and why:
OWN_TESTS_THAT_DIFFER = {
    "test_reorder": "reorders in place",
    "test_dataproto_fold_unfold": "reorders in place",
    "test_dataproto_unfold_column_chunks": "a function of the examples",
    "test_concat_conflicting_non_metric_keys": "the words of a message",
    "test_numpy_dataproto_serialization_skips_tensordict_consolidation": "calls __setstate__ of its own format",
}


def test_verls_own_tests(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    path = importlib.metadata.distribution("verl").locate_file("tests/test_protocol_on_cpu.py")
    spec = importlib.util.spec_from_file_location("verls_own_tests", path)
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    here = {name: getattr(ours(), name) for name in ours().__all__ if hasattr(verls(), name)}
    for module in (own, verls()):
        for name, value in here.items():
            monkeypatch.setattr(module, name, value, raising=False)
    tests = {name: test for name, test in vars(own).items() if name.startswith("test_")}
    about_it = {name: test for name, test in tests.items() if "DataProto" in inspect.getsource(test)}
    failed = {name for name, test in about_it.items() if not _passes(test, monkeypatch)}
    assert failed == set(OWN_TESTS_THAT_DIFFER)
    assert len(about_it) == 31


def _passes(test, monkeypatch):
    try:
        test(**({"monkeypatch": monkeypatch} if inspect.signature(test).parameters else {}))
    except (AssertionError, OSError, AttributeError, pytest.fail.Exception):
        return False
    return True
