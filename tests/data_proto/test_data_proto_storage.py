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

from rlprims.data_proto import DataProto
from tests.data_proto.data_proto_batches import jagged, make, rows_of

safetensors = pytest.importorskip("safetensors.torch")
METADATA = {"format": "rlprims.data_proto 3", "sha256": "0" * 64}


@pytest.fixture
def saved(tmp_path):
    make(5).save(tmp_path / "batch")
    return tmp_path / "batch"


def dtypes(part):
    return {name: column.dtype for name, column in part.items()}


def forge(path: Path, change) -> None:
    """Change the JSON and make the checksum right again, as an attacker would."""

    def changed(content: bytes) -> bytes:
        described = json.loads(content)
        change(described)
        return json.dumps(described).encode()

    forge_bytes(path, changed)


def forge_bytes(path: Path, change) -> None:
    tensors = safetensors.load_file(path)
    last = str(len(tensors) - 1)
    tensors[last] = torch.frombuffer(bytearray(change(tensors[last].numpy().tobytes())), dtype=torch.uint8)
    safetensors.save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata=METADATA)
    sign(path)


def sign(path: Path) -> None:
    """Write the hash of the file, with zeros in its place, into its metadata."""
    content = path.read_bytes()
    begin = content.index(b'"sha256":"') + len(b'"sha256":"')
    before, after = content[:begin], content[begin + 64 :]
    path.write_bytes(before + hashlib.sha256(before + b"0" * 64 + after).hexdigest().encode() + after)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def cyclic():
    value = {}
    value["again"] = np.array([value], dtype=object)
    return value


def test_round_trip(saved):
    data, back = make(5), DataProto.load(saved)
    assert rows_of(back) == rows_of(data)
    assert back.meta_info == data.meta_info
    assert dtypes(back.batch) == dtypes(data.batch)
    assert back["image"][3].dtype == data["image"][3].dtype
    assert back["score"].dtype == np.float64
    assert list(saved.parent.iterdir()) == [saved]


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
            "wide": np.array([["a", "\U0010ffff"]] * 4, dtype=">U40"),
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


def test_save_names_field_and_row_that_it_cannot_write(tmp_path):
    tensor, array = torch.zeros(1, dtype=torch.complex128), np.array(["2020"], "M8[Y]")
    cases = {
        r"non_tensor_batch\['o'\], row 1: builtins.object": DataProto.from_dict(non_tensors={"o": [1, object()]}),
        r"non_tensor_batch\['o'\], row 0: builtins.set": DataProto.from_dict(non_tensors={"o": [{"deep": [{1}]}, 1]}),
        r"meta_info\['f'\]: builtins.function": DataProto(meta_info={"f": lambda: 0}),
        r"batch\['c'\]: a tensor of torch.complex128": DataProto.from_dict({"c": tensor}),
        r"non_tensor_batch\['t'\]: an array of datetime64": DataProto.from_dict(non_tensors={"t": array}),
        r"non_tensor_batch\['d'\], row 1: nested too deeply": DataProto.from_dict(non_tensors={"d": [1, nested(5000)]}),
        r"meta_info\['c'\].*: nested too deeply, or a part of itself": DataProto(meta_info={"c": cyclic()}),
        r"meta_info\['n'\]: builtins.int": DataProto(meta_info={"n": 10**4300}),
    }
    for message, data in cases.items():
        with pytest.raises(ValueError, match=message):
            data.save(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_saving_again_replaces(saved):
    make(2).save(saved)
    assert len(DataProto.load(saved)) == 2
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, before, step):
    path = tmp_path / "batch"
    if before:
        make(before).save(path)
    was = {place: place.is_dir() or place.read_bytes() for place in tmp_path.rglob("*")}

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, step, fails)
    with pytest.raises(OSError, match="disk full"):
        make(4).save(path)
    assert {place: place.is_dir() or place.read_bytes() for place in tmp_path.rglob("*")} == was


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
@pytest.mark.parametrize("before", [0, 2])
def test_after_a_death_at_any_moment_there_is_one_whole_batch(tmp_path, before):
    """Each process dies one call to the system later than the one before, until one lives to the end."""
    path, found, status = tmp_path / "batch", [], None
    if before:
        make(before).save(path)
    while status != 0:
        child = os.fork()
        if child == 0:
            _save_and_die(path, calls=len(found))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9)
        found.append(len(DataProto.load(path)) if path.exists() else 0)
    assert set(found) == {before, 4}
    assert found == sorted(found)
    make(3).save(path)  # whatever the dead have left there
    assert len(DataProto.load(path)) == 3


def _save_and_die(path, calls):
    left = iter(range(calls))

    def hook(event, _):
        if (event == "open" or event.startswith("os.")) and next(left, None) is None:
            os._exit(9)

    sys.addaudithook(hook)
    make(4).save(path)
    os._exit(0)


def test_an_interrupt_just_after_the_last_step_takes_nothing_away(tmp_path, monkeypatch):
    real = os.replace

    def interrupted(*args):
        real(*args)
        raise KeyboardInterrupt

    make(2).save(tmp_path / "b")
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(4).save(tmp_path / "b")
    assert len(DataProto.load(tmp_path / "b")) == 4


def test_save_never_replaces_files_of_others(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text('{"name": "an app"}')
    safetensors.save_file({"0": torch.zeros(2)}, tmp_path / "weights", metadata={"format": "pt"})
    odd = b'{"__metadata__":"text"}'
    (tmp_path / "odd").write_bytes(len(odd).to_bytes(8, "little") + odd)
    for name in ("precious", "file", "web", "weights", "odd"):
        with pytest.raises(ValueError, match="is not a saved batch"):
            make(1).save(tmp_path / name)
    assert (tmp_path / "precious" / "thesis.tex").exists()
    assert (tmp_path / "web" / "manifest.json").read_text() == '{"name": "an app"}'
    assert safetensors.load_file(tmp_path / "weights")["0"].tolist() == [0.0, 0.0]
    make(1).save(tmp_path / "new" / "folders" / "b")
    make(2).save(tmp_path / "new" / "folders" / "b")
    assert len(DataProto.load(tmp_path / "new" / "folders" / "b")) == 2


def test_two_saves_at_once_leave_one_whole_batch(tmp_path, monkeypatch):
    real = os.replace

    def late(*args):
        monkeypatch.setattr(os, "replace", real)
        make(5).save(tmp_path / "b")  # another process begins and ends before this one's last step
        real(*args)

    make(2).save(tmp_path / "b")
    monkeypatch.setattr(os, "replace", late)
    make(4).save(tmp_path / "b")
    assert len(DataProto.load(tmp_path / "b")) == 4


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
    ranges = [line.split() for line in maps.read_text().splitlines() if str(tmp_path / "b") in line]
    assert any(int(r[0].split("-")[0], 16) <= address < int(r[0].split("-")[1], 16) for r in ranges)


# Damage and malice.


def test_missing_and_replaced_files(saved):
    content = saved.read_bytes()
    for damaged in (b"", content + b" x", b"\x80\x04N."):
        saved.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"has changed since it was written|is damaged or forged"):
            DataProto.load(saved)
    saved.unlink()
    with pytest.raises(ValueError, match=r"no batch at .*batch: expected a file"):
        DataProto.load(saved)


def test_the_folder_of_an_earlier_release_is_refused(tmp_path):
    (tmp_path / "batch").mkdir()
    (tmp_path / "batch" / "manifest.json").write_text('{"format": "rlprims.data_proto", "version": 2}')
    with pytest.raises(ValueError, match="a folder is read by the release that wrote it"):
        DataProto.load(tmp_path / "batch")


@pytest.mark.slow
def test_every_cut_and_every_changed_byte_is_seen(saved):
    content = saved.read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        for damaged in (content[:position], changed):
            saved.write_bytes(damaged)
            with pytest.raises(ValueError, match="load: "):
                DataProto.load(saved)


@pytest.mark.slow
def test_changed_bytes_with_right_checksums_end_in_an_error_or_a_batch(saved):
    """Such a file may say another thing, but what it says fits together and can be read to the end."""
    content, errors = saved.read_bytes(), 0
    for position in range(len(content)):
        change = (b"", b"\xff", b"9", bytes([content[position] ^ 1]))[position % 4]
        saved.write_bytes(content[:position] + change + content[position + 1 :])
        if b'"sha256":"' in saved.read_bytes():
            sign(saved)
        try:
            data = DataProto.load(saved)
        except ValueError:
            errors += 1
        else:
            data.check_consistency()
            assert len(repr(data)) + len(rows_of(data[:8])) > 0
    assert 0 < errors < len(content)
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(format="rlprims.data_proto 2"),
        lambda m: m.update(format="other"),
        lambda m: m.pop("format"),
        lambda m: m.pop("sha256"),
        lambda m: m.update(sha256=""),
        lambda m: m.update(sha256="0"),
        lambda m: m.update(sha256="0" * 65),
        lambda m: m.clear(),
    ],
)
def test_forged_metadata(saved, change):
    metadata = dict(METADATA)
    change(metadata)
    safetensors.save_file(safetensors.load_file(saved), saved, metadata=metadata)
    if len(metadata.get("sha256", "")) == 64:
        sign(saved)
    with pytest.raises(ValueError, match="load: "):
        DataProto.load(saved)


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
        put("non_tensor_batch", "uid", {"$strings": ["O", [5], 0]}),
        put("non_tensor_batch", "uid", {"$strings": ["<U99999999999", [5], 0]}),
        put("non_tensor_batch", "uid", {"$strings": ["<U999999999", [5], 0]}),
        put("non_tensor_batch", "uid", {"$strings": ["<U1", [5], 1]}),
        put("non_tensor_batch", "uid", {"$strings": ["<U1", [5], 99]}),
        put("non_tensor_batch", "uid", {"$strings": ["<U1", [5], ["a"] * 5]}),
        put("non_tensor_batch", "uid", {"$strings": ["<U1", [-5, -1], 3]}),
        put("non_tensor_batch", "uid", {"$objects": [[5, 1 << 62, 1 << 62], []]}),
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
    forge_bytes(saved, lambda _: b"[" * 200_000)
    with pytest.raises(ValueError, match="RecursionError"):
        DataProto.load(saved)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, (str(Bomb.target),))

    target = Path("unset")


def header(text, length=None):
    """Of a safetensors file, with the metadata of a batch."""
    metadata = json.dumps({"__metadata__": METADATA}, separators=(",", ":")).encode()
    text = metadata[:-1] + text.replace(b"{", b"," * (text != b"{}"), 1) if text.startswith(b"{") else text + metadata
    return (len(text) if length is None else length).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        header(b"{}", 1 << 60),
        header(b"{}", (1 << 64) - 1),
        header(b'{"0":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}') + bytes(8),
        header(b'{"0":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}}'),
        header(b'{"0":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}') + bytes(8),
        header(b'{"0":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"1":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}')
        + bytes(8),
        header(b'{"0":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}') + bytes(8),
        header(b"[" * 100_000),
        header(b'{"7":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}') + bytes(8),
        header(b'{"0":{"dtype":"O","shape":[2],"data_offsets":[0,8]}}') + bytes(8),
    ],
    ids=["huge", "overflow", "bomb", "product", "negative", "shared", "backwards", "deep", "unnumbered", "dtype"],
)  # fmt: skip
def test_forged_headers_with_right_checksums(saved, content):
    saved.write_bytes(content)
    sign(saved)
    with pytest.raises(ValueError, match="damaged or forged"):
        DataProto.load(saved)


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 2**63 - 1, 4 - 2**63, 3],  # of which every difference, as int64 counts, is positive
        [0, 5, 1, 3],
        [1, 1, 1, 3],
        [0, 1, 2, 9],
        [0, -1, 2, 3],
    ],
)
def test_forged_offsets_of_a_jagged_column(tmp_path, offsets):
    file = tmp_path / "b"
    DataProto.from_dict({"t": jagged([[1.0], [2.0], [3.0]])}).save(file)
    before, after = (np.array(numbers, dtype="<i8").tobytes() for numbers in ([0, 1, 2, 3], offsets))
    assert before in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(before, after))
    sign(file)
    with pytest.raises(ValueError, match="offsets that do not fit"):
        DataProto.load(file)


def test_a_pickle_with_right_checksums_is_not_run(saved):
    Bomb.target = saved.parent / "exploded"
    payload = pickle.dumps(Bomb())
    forge_bytes(saved, lambda _: payload)
    with pytest.raises(ValueError, match="damaged or forged"):
        DataProto.load(saved)
    saved.write_bytes(payload)
    with pytest.raises(ValueError, match="damaged or forged"):
        DataProto.load(saved)
    torch.save({"0": torch.zeros(1), "x": Bomb()}, saved)
    with pytest.raises(ValueError, match="damaged or forged"):
        DataProto.load(saved)
    assert not Bomb.target.exists()


def test_safetensors_absent(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[train\]' in the clone"):
        make(1).save(tmp_path / "b")
    with pytest.raises(ImportError, match="rlprims"):
        DataProto.load(tmp_path / "b")
