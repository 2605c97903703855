"""A batch on disk: a directory with numbers in safetensors, everything else in JSON, and checksums of both.

No pickle on this path: reading a file runs no code of it. Three files of fixed names::

    tensors.safetensors   every tensor and numeric array, named "0", "1", ...
    fields.json           which field is which tensor; object columns; meta_info
    manifest.json         format, version, size and sha256 of the other two
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlprims.data_proto import _jagged
from rlprims.data_proto._cells import decode, encode, encode_array, store
from rlprims.data_proto._errors import BatchError
from rlprims.data_proto._parts import batch_of, columns

if TYPE_CHECKING:
    from rlprims.data_proto._container import DataProto

_FORMAT, _VERSION = "rlprims.data_proto", 1
_TENSORS, _FIELDS, _MANIFEST = "tensors.safetensors", "fields.json", "manifest.json"


def save(data: DataProto, path: str | os.PathLike[str]) -> None:
    """Write the batch to a directory, all or nothing: a crash leaves what was there before, or the new batch.

    A batch that was saved at ``path`` is replaced; anything else there is left alone. Replacing takes two renames: a
    crash just between them leaves both batches beside ``path``, under hidden names that end in .old and .tmp.

    Raises:
        BatchError: something that cannot be saved (says which field and row), or other files at ``path``.
        ImportError: safetensors is not installed.

    >>> from rlprims.data_proto import DataProto
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     DataProto.from_dict({"ids": torch.arange(2)}, {"uid": ["a", "b"]}).save(f"{folder}/batch")
    ...     DataProto.load(f"{folder}/batch")["uid"].tolist()
    ['a', 'b']
    """
    safetensors = _safetensors()
    target = Path(path)
    if target.exists() and not (target / _MANIFEST).is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise BatchError(f"save: {target} exists and is not a saved batch; choose another path")
    tensors: list[Tensor] = []
    text = json.dumps(_described(data, tensors), allow_nan=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.parent / f".{target.name}.{secrets.token_hex(8)}.tmp"
    work.mkdir()
    try:
        safetensors.torch.save_file(_apart(tensors), str(work / _TENSORS))
        (work / _FIELDS).write_text(text, encoding="utf-8")
        files = {
            name: {"bytes": (work / name).stat().st_size, "sha256": _sha256(work / name)}
            for name in (_TENSORS, _FIELDS)
        }
        manifest = {"format": _FORMAT, "version": _VERSION, "files": files}
        (work / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        for place in (work / _TENSORS, work / _FIELDS, work / _MANIFEST, work):
            _sync(place)
        _replace(work, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def load_parts(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any], dict[Any, Any]]:
    """``batch``, ``non_tensor_batch`` and ``meta_info`` of a saved batch."""
    safetensors = _safetensors()
    target = Path(path)
    for name in (_MANIFEST, _TENSORS, _FIELDS):
        if (target / name).is_symlink() or not (target / name).is_file():
            raise BatchError(f"load: no batch at {target}: {name} is missing or not a plain file; was it copied whole?")
    try:
        _check_manifest(target, json.loads((target / _MANIFEST).read_bytes()))
        with safetensors.safe_open(str(target / _TENSORS), framework="pt") as file:
            tensors = [file.get_tensor(str(number)) for number in range(len(file.keys()))]
        described = json.loads((target / _FIELDS).read_bytes())
        dense = {_name(name): _tensor(entry, tensors) for name, entry in described["batch"]}
        arrays = {_name(name): decode(entry, tensors) for name, entry in described["non_tensor_batch"]}
        meta, rows = decode(described["meta_info"], tensors), described["rows"]
        if not isinstance(meta, dict) or type(rows) is not int or rows < 0:
            raise BatchError(f"meta_info is {type(meta).__name__} and rows is {rows!r}")
        return batch_of(dense, rows) if described["has_batch"] else None, arrays, meta
    except BatchError as error:
        raise BatchError(f"load: {target}: {error}") from error
    except Exception as error:
        # Whatever a forged file breaks while it is read is one thing to the caller: not a batch.
        raise BatchError(f"load: {target} is damaged or forged ({type(error).__name__}: {error})") from error


def _described(data: DataProto, tensors: list[Tensor]) -> dict[str, Any]:
    """The content of fields.json. Numbers are put on the list ``tensors``."""
    dense, arrays, rows = columns(data)
    return {
        "rows": rows or 0,
        "has_batch": data.batch is not None,
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
                for key, value in data.meta_info.items()
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
    # Wrong offsets would make torch read beyond the values.
    fits = offsets.dtype in (torch.int64, torch.int32) and offsets.ndim == 1 and offsets.numel() > 0
    fits = fits and type(dim) is int and 1 <= dim <= values.ndim
    if (
        not fits
        or int(offsets[0]) != 0
        or int(offsets[-1]) != values.shape[dim - 1]
        or bool((offsets.diff() < 0).any())
    ):
        raise BatchError("a jagged field has offsets that do not fit its values")
    return _jagged.together(_jagged.Parts(values, offsets, None, dim))


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise BatchError(f"a field is named {name!r}")
    return name


def _check_manifest(target: Path, manifest: Any) -> None:
    if manifest["format"] != _FORMAT or manifest["version"] != _VERSION:
        raise BatchError(
            f"the format is {manifest['format']!r} version {manifest['version']!r}, this reads {_FORMAT!r} version "
            f"{_VERSION}; read it with the release that wrote it"
        )
    if set(manifest["files"]) != {_TENSORS, _FIELDS}:
        raise BatchError(f"the manifest lists the files {sorted(manifest['files'])}, not {_TENSORS} and {_FIELDS}")
    for name, expected in manifest["files"].items():
        found = {"bytes": (target / name).stat().st_size, "sha256": _sha256(target / name)}
        if found != expected:
            raise BatchError(f"{name} has changed since it was written: {found}, the manifest says {expected}")


def _apart(tensors: list[Tensor]) -> dict[str, Tensor]:
    """The tensors by their number, contiguous, no two in one memory: the format has no views."""
    result, seen = {}, set()
    for number, tensor in enumerate(tensors):
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        result[str(number)] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return result


def _replace(work: Path, target: Path) -> None:
    """Rename ``work`` to ``target``. A directory with files cannot be renamed over, so an older batch steps aside."""
    if not target.exists():
        os.rename(work, target)
        return
    aside = work.with_suffix(".old")
    os.rename(target, aside)
    try:
        os.rename(work, target)
    except BaseException:
        os.rename(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


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
        raise ImportError('saving and loading need safetensors: pip install "rlprims[train]"') from error
