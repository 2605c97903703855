"""Pickling between processes, without copying a tensor twice.

With protocol 5 every tensor on the CPU is passed as one buffer: out of band no byte is copied here, in band each byte
once. With older protocols the tensors themselves are passed, because the picklers that use these protocols
(``torch.multiprocessing``) can share their memory.
"""

import pickle
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from rlprims.data_proto import _jagged
from rlprims.data_proto._columns import batch_of


def reduce_ex(data: Any, protocol: SupportsIndex) -> tuple[Any, ...]:
    buffers = protocol.__index__() >= 5
    batch = None
    if data.batch is not None:
        tensors = {name: _apart(tensor.detach(), buffers) for name, tensor in data.batch.items()}
        batch = (tensors, int(data.batch.batch_size[0]), data.batch.device)
    return _rebuild, (type(data), batch, {name: part for name, part in vars(data).items() if name != "batch"})


def _apart(tensor: Tensor, buffers: bool) -> tuple[Any, ...]:
    if not tensor.is_nested:
        return (_flat(tensor, buffers),)
    values, offsets, lengths, dim = _jagged.components(tensor)
    flat_lengths = None if lengths is None else _flat(lengths, buffers)
    return _flat(values, buffers), _flat(offsets, buffers), flat_lengths, dim


def _flat(tensor: Tensor, buffers: bool) -> Any:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return tensor
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if not flat.numel():
        return None, tensor.dtype, tuple(tensor.shape)
    if buffers:
        numbers: Any = flat.numpy()
        return pickle.PickleBuffer(numbers), tensor.dtype, tuple(tensor.shape)
    # Pickling a view would include all of the memory behind it.
    own = flat if flat.nbytes == flat.untyped_storage().nbytes() else flat.clone()
    return own, tensor.dtype, tuple(tensor.shape)


def _rebuild(kind: type[Any], batch: Any, rest: dict[str, Any]) -> Any:
    data = object.__new__(kind)
    data.__dict__.update(rest)
    for name, array in data.non_tensor_batch.items():
        if not array.flags.writeable:  # as a tensor's memory, below
            data.non_tensor_batch[name] = array.copy()
    data.batch = None
    if batch is not None:
        tensors, rows, device = batch
        data.batch = batch_of({name: _together(*parts) for name, parts in tensors.items()}, rows, device)
    return data


def _together(flat: Any, offsets: Any = None, lengths: Any = None, dim: int = 1) -> Tensor:
    if offsets is None:
        return _tensor(flat)
    ragged = None if lengths is None else _tensor(lengths)
    return _jagged.from_components(_jagged.Parts(_tensor(flat), _tensor(offsets), ragged, dim))


def _tensor(flat: Any) -> Tensor:
    if isinstance(flat, Tensor):
        return flat
    content, dtype, shape = flat
    if content is None:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if not isinstance(content, Tensor):
        # Read-only mapped memory is copied, because a write into a tensor on it would crash the process.
        writable = bytearray(content) if memoryview(content).readonly else content
        content = torch.frombuffer(writable, dtype=torch.uint8)
    return content.view(dtype).view(shape)
