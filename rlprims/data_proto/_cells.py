"""Python objects as JSON, exactly or not at all.

A value that JSON cannot represent is written as ``{"$kind": ...}``, and a dict that looks like that as a list of pairs.
Arrays and tensors are not written as text: they go to a separate list of tensors, and the JSON has their position in
it. Reading builds only the kinds that are listed here, so a hostile file can do no more than raise an error.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.data_proto._columns import Array, object_array
from rlprims.data_proto._errors import BatchError

SCALARS = {
    np.dtype(kind).name: kind
    for kind in (
        *(np.bool_, np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64),
        *(np.uint8, np.uint16, np.uint32, np.uint64),
    )
}
_STORABLE = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)

_LONGEST_INT = 14_000  # bits; Python parses no more than 4300 digits


def store(tensor: Tensor, tensors: list[Tensor], where: str) -> int:
    """Put a tensor on the list and return its position."""
    if tensor.dtype not in _STORABLE or tensor.layout != torch.strided:
        raise BatchError(f"{where}: a tensor of {tensor.dtype} and {tensor.layout} cannot be saved; convert it first")
    tensors.append(tensor.detach())
    return len(tensors) - 1


def encode(value: Any, tensors: list[Tensor], where: str) -> Any:
    """The JSON of a value. ``where`` is its name for the error that is raised if it cannot be saved."""
    try:
        return _encode(value, tensors, where)
    except RecursionError:
        raise BatchError(f"{where}: nested too deeply, or a part of itself; drop the field with select") from None


def _encode(value: Any, tensors: list[Tensor], where: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and value.bit_length() < _LONGEST_INT):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [_encode(item, tensors, where) for item in value]
    if kind is tuple:
        return {"$tuple": [_encode(item, tensors, where) for item in value]}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(item, tensors, where) for key, item in value.items()}
        return {"$dict": [[_encode(k, tensors, where), _encode(v, tensors, where)] for k, v in value.items()]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind in SCALARS.values():
        return {"$scalar": [value.dtype.name, _encode(value.item(), tensors, where)]}
    if kind is np.str_:
        return str(value)
    if kind is np.ndarray:
        return encode_array(value, tensors, where)
    if isinstance(value, Tensor) and not value.is_nested:
        return {"$tensor": store(value, tensors, where)}
    raise BatchError(
        f"{where}: {kind.__module__}.{kind.__qualname__} cannot be saved; convert it to numbers, strings, lists, "
        "dicts, bytes, arrays or tensors (an image with np.asarray), or drop the field with select"
    )


def encode_array(array: Any, tensors: list[Tensor], where: str) -> dict[str, Any]:
    if array.dtype == object:
        rows = np.indices(array.shape)[0].ravel() if array.ndim else [0]
        cells = [encode(cell, tensors, f"{where}, row {row}") for row, cell in zip(rows, array.flat, strict=True)]
        return {"$objects": [list(array.shape), cells]}
    if array.dtype.kind == "U":
        # As bytes and not as text, so that a short JSON cannot define an array of any width.
        code_points = torch.from_numpy(np.frombuffer(bytearray(array.tobytes()), np.uint8))
        return {"$strings": [array.dtype.str, list(array.shape), store(code_points, tensors, where)]}
    try:
        # A contiguous copy in this machine's byte order, because from_numpy takes no other.
        tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise BatchError(f"{where}: an array of {array.dtype} cannot be saved; convert it with astype first") from None
    return {"$array": store(tensor, tensors, where)}


def decode(value: Any, tensors: list[Tensor]) -> Any:
    """The value of a JSON. Any exception means that `encode` did not write this JSON."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(item, tensors) for key, item in value.items()}
    [(kind, content)] = value.items()
    match kind:
        case "$float" if content in ("nan", "inf", "-inf"):
            return float(content)
        case "$tuple":
            return tuple(decode(item, tensors) for item in content)
        case "$dict":
            return {decode(key, tensors): decode(item, tensors) for key, item in content}
        case "$bytes":
            return base64.b64decode(content, validate=True)
        case "$scalar":
            return SCALARS[content[0]](decode(content[1], tensors))
        case "$tensor" | "$array" if type(content) is int and content >= 0:
            return tensors[content] if kind == "$tensor" else tensors[content].numpy()
        case "$strings" if re.fullmatch(r"[<>]U\d{1,9}", content[0]):
            return _strings(content[0], content[1], tensors[content[2]])
        case "$objects":
            return object_array([decode(cell, tensors) for cell in content[1]]).reshape(content[0])
    raise BatchError(f"unknown content {kind!r}")


def _strings(dtype: str, shape: list[int], content: Tensor) -> Array:
    code_points = content.numpy().view(dtype[0] + "u4")
    if code_points.size != math.prod(shape) * int(dtype[2:]) or np.any(code_points > sys.maxunicode):
        raise BatchError("an array of strings whose characters do not fit its shape")
    return np.ndarray(shape, dtype, code_points)
