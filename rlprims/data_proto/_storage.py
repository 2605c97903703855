"""A batch on disk: a safetensors file. Pickle is not used, so reading a file cannot run code.

Its tensors are named "0", "1", ...: every tensor and numeric array, and at the end the bytes of a JSON, which has the
position of each field, object columns, and meta_info. The metadata has the format and the sha256 of the file.

JSON holds a Python object exactly or not at all. A value that JSON cannot represent is written as ``{"$kind": ...}``,
and a dict that looks like that as a list of pairs. Arrays and tensors go to the list of tensors, and the JSON has
their position in it. Reading builds only the kinds that are listed here, so a hostile file can only raise an error.
"""

import base64
import hashlib
import importlib
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims._extras import hint
from rlprims._files import flush
from rlprims.data_proto._columns import Array, BatchError, Columns, Jagged, batch_of, object_array

_FORMAT = "rlprims.data_proto 3"
_UNSIGNED = {"format": _FORMAT, "sha256": "0" * 64}
_LARGEST_HEADER = 100_000_000  # bytes, of safetensors
_SCALARS = {"bool", "float16", "float32", "float64"}
_SCALARS |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_STORABLE = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)

_LONGEST_INT = 14_000  # bits; Python parses no more than 4300 digits


def save(path: str | os.PathLike[str], columns: Columns, meta_info: Mapping[Any, Any], *, has_batch: bool) -> None:
    """Write the parts of a batch. ``has_batch`` distinguishes a ``batch`` without tensors from None."""
    safetensors = _safetensors()
    target = Path(path)
    if target.exists() and not _is_batch(target):
        raise BatchError(f"save: {target} exists and is not a saved batch; choose another path")
    tensors: list[Tensor] = []
    text = json.dumps(_described(columns, meta_info, has_batch, tensors), allow_nan=False)
    tensors.append(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        safetensors.torch.save_file(_separate(tensors), str(aside), metadata=_UNSIGNED)
        with aside.open("r+b") as file:
            head, unsigned = _head(file)
            found = _hash(file, head, unsigned)
            file.seek(head.index(unsigned))
            file.write(found)
        flush(aside)
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    flush(target.parent)


def load_parts(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any], dict[Any, Any]]:
    """``batch``, ``non_tensor_batch`` and ``meta_info`` of a saved batch."""
    safetensors = _safetensors()
    target = Path(path)
    if not target.is_file():
        raise BatchError(f"load: no batch at {target}: expected a file; a folder is read by the release that wrote it")
    try:
        with target.open("rb") as signed:
            head, expected = _head(signed)
            got = _hash(signed, head, expected)
        if got != expected:
            raise BatchError(f"the file has changed since it was written: got {got!r}, expected {expected!r}")
        with safetensors.safe_open(str(target), framework="pt") as file:
            tensors = [file.get_tensor(str(number)) for number in range(len(file.keys()))]
        described = json.loads(tensors[-1].numpy().tobytes())
        dense = {name: _column(entry, tensors) for name, entry in described["batch"]}
        arrays = {name: _decode(entry, tensors) for name, entry in described["non_tensor_batch"]}
        meta, rows = _decode(described["meta_info"], tensors), described["rows"]
        if not isinstance(meta, dict) or type(rows) is not int or rows < 0:
            raise BatchError(f"meta_info is {type(meta).__name__} and rows is {rows!r}, expected a dict and a number")
        if not all(isinstance(name, str) for name in (*dense, *arrays)):
            raise BatchError(f"the fields are named {[*dense, *arrays]}, expected strings")
        return batch_of(dense, rows) if described["has_batch"] else None, arrays, meta
    except BatchError as error:
        raise BatchError(f"load: {target}: {error}") from error
    except Exception as error:
        # A forged file can raise any error while it is read; the caller gets one error for all of them.
        raise BatchError(f"load: {target} is damaged or forged ({type(error).__name__}: {error})") from error


def _head(file: Any) -> tuple[bytes, bytes]:
    """The bytes of a file before its tensors, and the hash that they have; an error if it is no batch."""
    head = file.read(8)
    head += file.read(min(int.from_bytes(head, "little"), _LARGEST_HEADER))
    metadata = json.loads(head[8:])["__metadata__"]
    if (form := metadata.get("format")) != _FORMAT:
        raise BatchError(f"the format is {form!r}, expected {_FORMAT!r}; read it with the release that wrote it")
    return head, metadata["sha256"].encode()


def _hash(file: Any, head: bytes, signed: bytes) -> bytes:
    """The hash of a file whose head was read, with zeros in the place of the hash ``signed``."""
    content = hashlib.sha256(head.replace(signed, _UNSIGNED["sha256"].encode(), 1))
    return hashlib.file_digest(file, lambda: content).hexdigest().encode()


def _is_batch(target: Path) -> bool:
    try:
        with target.open("rb") as file:
            _head(file)
        return True
    except Exception:  # a folder, or a file of another program, which may have anything in it
        return False


def _described(columns: Columns, meta: Mapping[Any, Any], has_batch: bool, tensors: list[Tensor]) -> dict[str, Any]:
    """The content of the JSON. Numbers are appended to the list ``tensors``."""

    def entry(name: str, tensor: Tensor) -> dict[str, int]:
        where = f"save: batch[{name!r}]"
        if not tensor.is_nested:
            return {"tensor": _store(tensor, tensors, where)}
        values, offsets, _, dim = Jagged.packed(tensor)
        return {"values": _store(values, tensors, where), "offsets": _store(offsets, tensors, where), "dim": dim}

    def pair(key: Any, value: Any) -> list[Any]:
        where = f"save: meta_info[{key!r}]"
        return [_encode(key, tensors, f"{where}, its key"), _encode(value, tensors, where)]

    arrays = {name: (array, f"save: non_tensor_batch[{name!r}]") for name, array in columns.arrays.items()}
    return {
        "rows": columns.rows or 0,
        "has_batch": has_batch,
        "batch": [[name, entry(name, tensor)] for name, tensor in columns.tensors.items()],
        "non_tensor_batch": [[name, _encode_array(a, tensors, where)] for name, (a, where) in arrays.items()],
        "meta_info": {"$dict": [pair(key, value) for key, value in meta.items()]},
    }


def _column(entry: dict[str, int], tensors: list[Tensor]) -> Tensor:
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
    return Jagged(values, offsets, None, dim).nested()


def _separate(tensors: list[Tensor]) -> dict[str, Tensor]:
    """The tensors by their number, contiguous and without shared memory, because the format has no views."""
    result, seen = {}, set()
    for number, tensor in enumerate(tensors):
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        result[str(number)] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return result


def _safetensors() -> Any:
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise ImportError(f"saving and loading need safetensors: {hint('train')}") from error


def _store(tensor: Tensor, tensors: list[Tensor], where: str) -> int:
    """Put a tensor on the list and return its position."""
    if tensor.dtype not in _STORABLE or tensor.layout != torch.strided:
        raise BatchError(f"{where}: a tensor of {tensor.dtype} and {tensor.layout} cannot be saved; convert it first")
    tensors.append(tensor.detach())
    return len(tensors) - 1


def _encode(value: Any, tensors: list[Tensor], where: str) -> Any:
    """The JSON of a value. ``where`` is its name for the error that is raised if it cannot be saved."""
    try:
        return _json(value, tensors, where)
    except RecursionError:
        raise BatchError(f"{where}: nested too deeply, or a part of itself; drop the field with select") from None


def _json(value: Any, tensors: list[Tensor], where: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and value.bit_length() < _LONGEST_INT):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [_json(item, tensors, where) for item in value]
    if kind is tuple:
        return {"$tuple": [_json(item, tensors, where) for item in value]}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _json(item, tensors, where) for key, item in value.items()}
        return {"$dict": [[_json(k, tensors, where), _json(v, tensors, where)] for k, v in value.items()]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is np.str_:
        return str(value)
    if isinstance(value, np.generic) and value.dtype.name in _SCALARS:
        return {"$scalar": [value.dtype.name, _json(value.item(), tensors, where)]}
    if kind is np.ndarray:
        return _encode_array(value, tensors, where)
    if isinstance(value, Tensor) and not value.is_nested:
        return {"$tensor": _store(value, tensors, where)}
    raise BatchError(
        f"{where}: {kind.__module__}.{kind.__qualname__} cannot be saved; convert it to numbers, strings, lists, "
        "dicts, bytes, arrays or tensors (an image with np.asarray), or drop the field with select"
    )


def _encode_array(array: Any, tensors: list[Tensor], where: str) -> dict[str, Any]:
    if array.dtype == object:
        shared = {id(cell): cell for cell in array.flat if type(cell) is tuple}
        if array.ndim == 1 and len(shared) < len(array) and all(type(cell) is tuple for cell in array):  # as images are
            at = {key: i for i, key in enumerate(shared)}
            cells = [_encode(cell, tensors, where) for cell in shared.values()]
            return {"$shared": [cells, [at[id(cell)] for cell in array]]}
        rows = np.indices(array.shape)[0].ravel() if array.ndim else [0]
        cells = [_encode(cell, tensors, f"{where}, row {row}") for row, cell in zip(rows, array.flat, strict=True)]
        return {"$objects": [list(array.shape), cells]}
    if array.dtype.kind == "U":
        # As bytes and not as text, so that a short JSON cannot define an array of any width.
        code_points = torch.from_numpy(np.frombuffer(bytearray(array.tobytes()), np.uint8))
        return {"$strings": [array.dtype.str, list(array.shape), _store(code_points, tensors, where)]}
    try:
        # A contiguous copy in this machine's byte order, because from_numpy takes no other.
        tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise BatchError(f"{where}: an array of {array.dtype} cannot be saved; convert it with astype first") from None
    return {"$array": _store(tensor, tensors, where)}


def _decode(value: Any, tensors: list[Tensor]) -> Any:
    """The value of a JSON. Any exception means that `_encode` did not write this JSON."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: _decode(item, tensors) for key, item in value.items()}
    [(kind, content)] = value.items()
    match kind:
        case "$float" if content in ("nan", "inf", "-inf"):
            return float(content)
        case "$tuple":
            return tuple(_decode(item, tensors) for item in content)
        case "$dict":
            return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
        case "$bytes":
            return base64.b64decode(content, validate=True)
        case "$scalar" if content[0] in _SCALARS:
            return np.dtype(content[0]).type(_decode(content[1], tensors))
        case "$tensor" | "$array" if type(content) is int and content >= 0:
            return tensors[content] if kind == "$tensor" else tensors[content].numpy()
        case "$strings" if re.fullmatch(r"[<>]U\d{1,9}", content[0]):
            return _strings(content[0], content[1], tensors[content[2]])
        case "$shared":
            cells = [_decode(cell, tensors) for cell in content[0]]
            return object_array([cells[i] for i in content[1]])
        case "$objects":
            return object_array([_decode(cell, tensors) for cell in content[1]]).reshape(content[0])
    raise BatchError(f"unknown content {kind!r}")


def _strings(dtype: str, shape: list[int], content: Tensor) -> Array:
    code_points = content.numpy().view(dtype[0] + "u4")
    if code_points.size != math.prod(shape) * int(dtype[2:]) or np.any(code_points > sys.maxunicode):
        raise BatchError("an array of strings whose characters do not fit its shape")
    return np.ndarray(shape, dtype, code_points)
