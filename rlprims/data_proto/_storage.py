"""A batch on disk: a directory with numbers in safetensors, everything else in JSON, and checksums of both.

Pickle is not used, so reading a file cannot run code. There are three files, the first two with a new name per save::

    tensors-<16 hex digits>.safetensors   every tensor and numeric array, named "0", "1", ...
    fields-<16 hex digits>.json           which field is which tensor; object columns; meta_info
    manifest.json                         format, version, names, sizes and sha256 of the other two

The manifest alone defines which files are the batch, so replacing the manifest replaces the batch.
"""

import hashlib
import importlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlprims._extras import hint
from rlprims.data_proto import _jagged
from rlprims.data_proto._cells import decode, encode, encode_array, store
from rlprims.data_proto._columns import Columns, batch_of
from rlprims.data_proto._errors import BatchError

_FORMAT, _VERSION, _MANIFEST = "rlprims.data_proto", 2, "manifest.json"
_DATA = re.compile(r"(fields)-[0-9a-f]{16}\.json|(tensors)-[0-9a-f]{16}\.safetensors")


def save(path: str | os.PathLike[str], columns: Columns, meta_info: Mapping[Any, Any], *, has_batch: bool) -> None:
    """Write the parts of a batch. ``has_batch`` distinguishes a ``batch`` without tensors from None."""
    safetensors = _safetensors()
    target = Path(path)
    if not _may_hold_a_batch(target):
        raise BatchError(f"save: {target} exists and is not a saved batch; choose another path")
    tensors: list[Tensor] = []
    text = json.dumps(_described(columns, meta_info, has_batch, tensors), allow_nan=False)
    new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(8)
    numbers, fields = target / f"tensors-{token}.safetensors", target / f"fields-{token}.json"
    manifest = target / f"{_MANIFEST}.{token}"
    try:
        safetensors.torch.save_file(_separate(tensors), str(numbers))
        fields.write_text(text, encoding="utf-8")
        files = {place.name: {"bytes": place.stat().st_size, "sha256": _sha256(place)} for place in (numbers, fields)}
        about = {"format": _FORMAT, "version": _VERSION, "files": files}
        manifest.write_text(json.dumps(about, indent=2), encoding="utf-8")
        for place in (numbers, fields, manifest, target):
            _sync(place)
        before = _listed(target)
        os.replace(manifest, target / _MANIFEST)
    except BaseException:
        if not _is_plain(target / _MANIFEST) or fields.name not in _listed(
            target
        ):  # otherwise the error came just after the rename
            _remove(numbers, fields, manifest)
        if new:
            with suppress(OSError):
                target.rmdir()
        raise
    for place in (target, target.parent):
        _sync(place)
    # Only these are removed: other files may belong to an unfinished save of another process.
    _remove(*(target / name for name in before))


def load_parts(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any], dict[Any, Any]]:
    """``batch``, ``non_tensor_batch`` and ``meta_info`` of a saved batch."""
    safetensors = _safetensors()
    target = Path(path)
    if not _is_plain(target / _MANIFEST):
        raise BatchError(f"load: no batch at {target}: {_MANIFEST} is missing or not a plain file")
    try:
        fields, numbers = _checked(target)
        with safetensors.safe_open(str(numbers), framework="pt") as file:
            tensors = [file.get_tensor(str(number)) for number in range(len(file.keys()))]
        described = json.loads(fields.read_bytes())
        dense = {_name(name): _tensor(entry, tensors) for name, entry in described["batch"]}
        arrays = {_name(name): decode(entry, tensors) for name, entry in described["non_tensor_batch"]}
        meta, rows = decode(described["meta_info"], tensors), described["rows"]
        if not isinstance(meta, dict) or type(rows) is not int or rows < 0:
            raise BatchError(f"meta_info is {type(meta).__name__} and rows is {rows!r}")
        return batch_of(dense, rows) if described["has_batch"] else None, arrays, meta
    except BatchError as error:
        raise BatchError(f"load: {target}: {error}") from error
    except Exception as error:
        # A forged file can raise any error while it is read; the caller gets one error for all of them.
        raise BatchError(f"load: {target} is damaged or forged ({type(error).__name__}: {error})") from error


def _described(
    columns: Columns, meta_info: Mapping[Any, Any], has_batch: bool, tensors: list[Tensor]
) -> dict[str, Any]:
    """The content of fields.json. Numbers are appended to the list ``tensors``."""
    dense, arrays, rows = columns
    return {
        "rows": rows or 0,
        "has_batch": has_batch,
        "batch": [[name, _entry(name, tensor, tensors)] for name, tensor in dense.items()],
        "non_tensor_batch": [
            [name, encode_array(array, tensors, f"save: non_tensor_batch[{name!r}]")] for name, array in arrays.items()
        ],
        "meta_info": {
            "$dict": [
                [
                    encode(key, tensors, f"save: meta_info key {key!r}"),
                    encode(value, tensors, f"save: meta_info[{key!r}]"),
                ]
                for key, value in meta_info.items()
            ]
        },
    }


def _entry(name: str, tensor: Tensor, tensors: list[Tensor]) -> dict[str, Any]:
    where = f"save: batch[{name!r}]"
    if not tensor.is_nested:
        return {"tensor": store(tensor, tensors, where)}
    values, offsets, _, dim = _jagged.packed(tensor)
    return {"values": store(values, tensors, where), "offsets": store(offsets, tensors, where), "dim": dim}


def _tensor(entry: dict[str, int], tensors: list[Tensor]) -> Tensor:
    if "tensor" in entry:
        return tensors[entry["tensor"]]
    values, offsets, dim = tensors[entry["values"]], tensors[entry["offsets"]], entry["dim"]
    # With wrong offsets torch would read beyond the values.
    fits = offsets.dtype in (torch.int64, torch.int32) and offsets.ndim == 1 and offsets.numel() > 0
    fits = fits and type(dim) is int and 1 <= dim <= values.ndim
    if (
        not fits
        or int(offsets[0]) != 0
        or int(offsets[-1]) != values.shape[dim - 1]
        or bool((offsets[1:] < offsets[:-1]).any())  # not diff(), which overflows for a forged file
    ):
        raise BatchError("a jagged field has offsets that do not fit its values")
    return _jagged.from_components(_jagged.Parts(values, offsets, None, dim))


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise BatchError(f"a field is named {name!r}, expected a string")
    return name


def _may_hold_a_batch(target: Path) -> bool:
    """Whether the target does not exist, is a saved batch, or has only the files of an unfinished save."""
    if not target.is_dir():
        return not target.exists()
    try:
        return bool(_listed(target)) or all(
            _DATA.fullmatch(entry.name) or entry.name.startswith(f"{_MANIFEST}.") for entry in target.iterdir()
        )
    except (ValueError, TypeError, KeyError, OSError):
        return False  # a manifest.json of another program


def _listed(target: Path) -> dict[str, Any]:
    """The files in the manifest, fields first, with size and sha256; empty if there is no manifest."""
    if not (target / _MANIFEST).exists():
        return {}
    about = json.loads((target / _MANIFEST).read_bytes())
    if about["format"] != _FORMAT or about["version"] != _VERSION:
        raise BatchError(
            f"the format is {about['format']!r} version {about['version']!r}, expected {_FORMAT!r} version "
            f"{_VERSION}; read it with the release that wrote it"
        )
    files = dict(sorted(about["files"].items()))
    if [match and match.lastindex for match in map(_DATA.fullmatch, files)] != [1, 2]:
        raise BatchError(f"the manifest names the files {[*files]}, expected one of fields and one of tensors")
    return files


def _checked(target: Path) -> list[Path]:
    """The paths of fields and tensors, after a check that both files are unchanged."""
    places = []
    for name, expected in _listed(target).items():
        place = target / name
        if not _is_plain(place):
            raise BatchError(f"{name} is missing or not a plain file; was it copied whole?")
        found = {"bytes": place.stat().st_size, "sha256": _sha256(place)}
        if found != expected:
            raise BatchError(f"{name} has changed since it was written: got {found}, expected {expected}")
        places.append(place)
    return places


def _remove(*places: Path) -> None:
    for place in places:
        with suppress(OSError):
            place.unlink()


def _is_plain(place: Path) -> bool:
    return place.is_file() and not place.is_symlink()


def _separate(tensors: list[Tensor]) -> dict[str, Tensor]:
    """The tensors by their number, contiguous and without shared memory, because the format has no views."""
    result, seen = {}, set()
    for number, tensor in enumerate(tensors):
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        result[str(number)] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return result


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _safetensors() -> Any:
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise ImportError(f"saving and loading need safetensors: {hint('train')}") from error
