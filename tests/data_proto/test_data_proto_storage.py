"""On disk: exact, atomic, and closed to whatever a file may hold."""

import hashlib
import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data_proto_batches import jagged, make, rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlprims.data_proto import DataProto

safetensors = pytest.importorskip("safetensors")
FILES = ["manifest.json", "fields.json", "tensors.safetensors"]


@pytest.fixture
def saved(tmp_path):
    make(5).save(tmp_path / "batch")
    return tmp_path / "batch"


def dtypes(part):
    return {name: column.dtype for name, column in part.items()}


def forge(path: Path, change) -> None:
    """Change fields.json and make the checksums right again, as an attacker would."""
    described = json.loads((path / "fields.json").read_text())
    change(described)
    (path / "fields.json").write_text(json.dumps(described))
    sign(path)


def sign(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    for name in FILES[1:]:
        content = (path / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_round_trip(saved):
    data, back = make(5), DataProto.load(saved)
    assert rows_of(back) == rows_of(data)
    assert back.meta_info == data.meta_info
    assert dtypes(back.batch) == dtypes(data.batch)
    assert back["image"][3].dtype == data["image"][3].dtype
    assert back["score"].dtype == np.float64
    assert sorted(os.listdir(saved)) == sorted(FILES)


def test_every_object_that_can_be_saved_comes_back_as_it_was(tmp_path):
    cells = [
        *(None, True, 3, 2**70, -0.0, float("inf"), "text \ud800 \n", b"\x00\xff", (1, [2, (3,)])),
        *({"a": {"b": [1]}}, {1: "x", ("t", 2): None}, {"$float": "nan"}, np.float32(0.1), np.int8(-3), np.bool_(True)),
        *(np.array([[1, 2]], dtype=np.uint16), np.array(["ab", "c"]), np.array([None, [1]], dtype=object)),
        *(np.array(3.5), np.zeros((0, 2)), np.arange(6).reshape(2, 3).T, np.array([1, 2], dtype=">i4")),
        torch.tensor([[1.5]], dtype=torch.bfloat16),
    ]
    data = DataProto.from_dict(non_tensors={"cell": cells}, meta_info={"m": cells, 5: "five", "n": float("nan")})
    data.save(tmp_path / "b")
    back = DataProto.load(tmp_path / "b")
    for got, want in zip([*back["cell"], *back.meta_info["m"]], [*cells, *cells], strict=True):
        assert type(got) is type(want)
        if isinstance(want, np.ndarray):
            assert got.shape == want.shape
            assert got.dtype == want.dtype.newbyteorder("=")
            assert got.tolist() == want.tolist()
        else:
            assert repr(got) == repr(want)
    assert back.meta_info[5] == "five"
    assert np.isnan(back.meta_info["n"])


def test_every_column_that_can_be_saved_comes_back_as_it_was(tmp_path):
    base = torch.arange(8.0)
    data = DataProto.from_dict(
        {
            "view": base[:4],
            "other_view": base[4:],
            "same": base[:4],
            "strided": base.view(4, 2)[:, 0],
            "bf16": base[:4].bfloat16(),
            "bool": base[:4] > 1,
            "graph": torch.ones(4, requires_grad=True) * 2,
            "jagged": jagged([[1.0], [], [2.0, 3.0], [4.0]]),
            "inner": torch.nested.nested_tensor([torch.ones(n, 2) for n in (2, 0, 1, 1)], layout=torch.jagged),
        },
        {
            "names": np.array(["a", "bcd", "", "é"]),
            "grid": np.array([[1, None]] * 4, dtype=object),
            "f": np.ones((4, 2)),
        },
    )
    data[1:3].save(tmp_path / "b")
    back = DataProto.load(tmp_path / "b")
    assert rows_of(back) == rows_of(data[1:3])
    assert dtypes(back.batch) == dtypes(data.batch)
    assert dtypes(back.non_tensor_batch) == dtypes(data.non_tensor_batch)


def test_only_metadata_or_only_objects(tmp_path):
    DataProto(meta_info={"a": 1}).save(tmp_path / "meta")
    assert DataProto.load(tmp_path / "meta").meta_info == {"a": 1}
    DataProto.from_dict(non_tensors={"uid": ["a"]}).save(tmp_path / "objects")
    assert DataProto.load(tmp_path / "objects").batch is None
    popped = make(3).select(batch_keys=[], non_tensor_batch_keys=[])
    popped.save(tmp_path / "rows")
    assert len(DataProto.load(tmp_path / "rows")) == 3


def test_what_cannot_be_saved_is_named_by_field_and_row(tmp_path):
    tensor, array = torch.zeros(1, dtype=torch.complex128), np.array(["2020"], "M8[Y]")
    cases = {
        r"non_tensor_batch\['o'\], row 1: builtins.object": DataProto.from_dict(non_tensors={"o": [1, object()]}),
        r"non_tensor_batch\['o'\], row 0: builtins.set": DataProto.from_dict(non_tensors={"o": [{"deep": [{1}]}, 1]}),
        r"meta_info\['f'\]: builtins.function": DataProto(meta_info={"f": lambda: 0}),
        r"batch\['c'\]: a tensor of torch.complex128": DataProto.from_dict({"c": tensor}),
        r"non_tensor_batch\['t'\]: an array of datetime64": DataProto.from_dict(non_tensors={"t": array}),
    }
    for message, data in cases.items():
        with pytest.raises(ValueError, match=message):
            data.save(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_saving_again_replaces_and_a_failure_leaves_what_was_there(saved, monkeypatch):
    make(2).save(saved)
    assert len(DataProto.load(saved)) == 2

    def fails(*_):
        raise OSError("disk full")

    for function in ("fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, fails)
            with pytest.raises(OSError, match="disk full"):
                make(4).save(saved)
        assert rows_of(DataProto.load(saved)) == rows_of(make(2))
        assert [path.name for path in saved.parent.iterdir()] == ["batch"]


def test_other_files_are_never_replaced(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("precious", "file"):
        with pytest.raises(ValueError, match="is not a saved batch"):
            make(1).save(tmp_path / name)
    assert (tmp_path / "precious" / "thesis.tex").exists()
    (tmp_path / "empty").mkdir()
    make(1).save(tmp_path / "empty")
    make(1).save(tmp_path / "new" / "folders" / "b")
    assert len(DataProto.load(tmp_path / "new" / "folders" / "b")) == 1


def test_writes_into_loaded_tensors_stay_in_memory(saved):
    back = DataProto.load(saved)
    back["ids"].fill_(-1)
    back["score"][:] = -1
    back["image"][1][:] = -1
    assert rows_of(DataProto.load(saved)) == rows_of(make(5))


def test_loaded_tensors_are_mapped(tmp_path):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    DataProto.from_dict({"x": torch.zeros(1 << 16)}).save(tmp_path / "b")
    back = DataProto.load(tmp_path / "b")
    address = back["x"].data_ptr()
    ranges = [line.split() for line in maps.read_text().splitlines() if "tensors.safetensors" in line]
    assert any(int(r[0].split("-")[0], 16) <= address < int(r[0].split("-")[1], 16) for r in ranges)


# Damage and malice.


@pytest.mark.parametrize("name", FILES)
def test_missing_truncated_and_replaced_files(saved, name):
    content = (saved / name).read_bytes()
    for damaged in (b"", content[:-1], content[: len(content) // 2], content + b" x", b"\x80\x04N."):
        (saved / name).write_bytes(damaged)
        with pytest.raises(ValueError, match="batch"):
            DataProto.load(saved)
    (saved / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        DataProto.load(saved)
    elsewhere = saved.parent / "elsewhere"
    elsewhere.write_bytes(content)
    (saved / name).symlink_to(elsewhere)
    with pytest.raises(ValueError, match="not a plain file"):
        DataProto.load(saved)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unseen(tmp_path_factory, name, where, bit):
    path = tmp_path_factory.getbasetemp() / "flipped"
    make(3).save(path)
    content = bytearray((path / name).read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    (path / name).write_bytes(content)
    with pytest.raises(ValueError, match="load: "):
        DataProto.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(version=2),
        lambda m: m.update(version="1"),
        lambda m: m.update(format="other"),
        lambda m: m.pop("files"),
        lambda m: m["files"].update({"../../etc/passwd": m["files"]["fields.json"]}),
        lambda m: m["files"].update({"/etc/passwd": m["files"].pop("fields.json")}),
        lambda m: m["files"].pop("tensors.safetensors"),
        lambda m: m["files"].update({"fields.json": None}),
    ],
)
def test_forged_manifests(saved, change):
    manifest = json.loads((saved / "manifest.json").read_text())
    change(manifest)
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="load: "):
        DataProto.load(saved)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def put(key, name, value):
    return lambda d: next(entry for entry in d[key] if entry[0] == name).__setitem__(1, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.clear(),
        lambda d: d.update(rows=4),
        lambda d: d.update(rows=-1),
        lambda d: d.update(rows="5"),
        lambda d: d.update(batch={"a": 1}),
        lambda d: d.update(meta_info=[1]),
        lambda d: d["batch"].append([["unhashable"], {"tensor": 0}]),
        lambda d: d["non_tensor_batch"].append([7, {"$objects": [[5], [1] * 5]}]),
        put("batch", "ids", {"tensor": 99}),
        put("batch", "ids", {"tensor": "0"}),
        put("batch", "ids", {"pickle": 0}),
        put("batch", "tokens", {"values": 0, "offsets": 1, "dim": 1}),
        put("batch", "tokens", {"values": 0, "offsets": 0, "dim": 1}),
        put("batch", "tokens", {"values": 2, "offsets": 3, "dim": 9}),
        put("batch", "tokens", {"values": 2, "offsets": 3, "dim": True}),
        put("non_tensor_batch", "uid", {"$objects": [[4], ["a"] * 4]}),
        put("non_tensor_batch", "uid", {"$objects": [[5, 2], ["a"] * 5]}),
        put("non_tensor_batch", "uid", {"$objects": [[5], "not a list of cells"]}),
        put("non_tensor_batch", "uid", {"$pickle": "gASVBQAAAAAAAACMAXiULg=="}),
        put("non_tensor_batch", "uid", {"$strings": ["O", [5], ["a"] * 5]}),
        put("non_tensor_batch", "uid", {"$strings": ["<U99999999999", [5], ["a"] * 5]}),
        put("non_tensor_batch", "uid", {"$array": -1}),
        put("non_tensor_batch", "uid", {"$array": True}),
        put("non_tensor_batch", "uid", {"$array": 99}),
        put("non_tensor_batch", "uid", {"$scalar": ["__class__", 1]}),
        put("non_tensor_batch", "uid", {"$tuple": 5}),
        put("non_tensor_batch", "uid", {"$bytes": "&&&"}),
        put("non_tensor_batch", "uid", {"$float": "0"}),
        put("non_tensor_batch", "uid", {"$dict": [[[], 1]]}),
        put("non_tensor_batch", "uid", {"$a": 1, "$b": 2}),
        put("non_tensor_batch", "uid", "a string"),
        put("non_tensor_batch", "uid", nested(900)),
    ],
)
def test_forged_fields_with_right_checksums(saved, change):
    forge(saved, change)
    with pytest.raises(ValueError, match=r"load: |non_tensor_batch|rows"):
        DataProto.load(saved)


def test_json_nested_beyond_the_stack(saved):
    (saved / "fields.json").write_text("[" * 200_000)
    sign(saved)
    with pytest.raises(ValueError, match="RecursionError"):
        DataProto.load(saved)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, (str(Bomb.target),))

    target = Path("unset")


@pytest.mark.parametrize("name", ["tensors.safetensors", "fields.json"])
def test_a_pickle_with_right_checksums_is_not_run(saved, name):
    Bomb.target = saved.parent / "exploded"
    payload = pickle.dumps(Bomb())
    (saved / name).write_bytes(payload)
    sign(saved)
    with pytest.raises(ValueError, match="damaged or forged"):
        DataProto.load(saved)
    torch.save({"0": torch.zeros(1), "x": Bomb()}, saved / name)
    sign(saved)
    with pytest.raises(ValueError, match="damaged or forged"):
        DataProto.load(saved)
    assert not Bomb.target.exists()


def test_safetensors_absent(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r'pip install "rlprims\[train\]"'):
        make(1).save(tmp_path / "b")
    with pytest.raises(ImportError, match="rlprims"):
        DataProto.load(tmp_path / "b")
