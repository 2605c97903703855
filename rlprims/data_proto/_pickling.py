"""A batch between processes.

It is pickled, and no tensor is copied twice. With protocol 5 every tensor on the CPU is one buffer: out of band no
byte is copied here, in band each byte once. With older protocols the tensors themselves are pickled, because the
picklers that use these protocols (``torch.multiprocessing``) can share their memory.
"""

import pickle
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from rlprims.data_proto._columns import Jagged, batch_of


def reduce_ex(data: Any, protocol: SupportsIndex) -> tuple[Any, ...]:
    buffers = protocol.__index__() >= 5
    batch = None
    if data.batch is not None:
        tensors = {name: _split(tensor.detach(), buffers) for name, tensor in data.batch.items()}
        batch = (tensors, int(data.batch.batch_size[0]), data.batch.device)
    return _rebuild, (type(data), batch, {name: part for name, part in vars(data).items() if name != "batch"})


def _rebuild(kind: type[Any], batch: Any, rest: dict[str, Any]) -> Any:
    data = object.__new__(kind)
    data.__dict__.update(rest)
    for name, array in data.non_tensor_batch.items():
        if not array.flags.writeable:  # mapped memory, see _unflat
            data.non_tensor_batch[name] = array.copy()
    data.batch = None
    if batch is not None:
        tensors, rows, device = batch
        data.batch = batch_of({name: _unsplit(parts) for name, parts in tensors.items()}, rows, device)
    return data


def _split(tensor: Tensor, buffers: bool) -> tuple[Any, ...]:
    """A dense tensor as one entry; a jagged tensor as one entry per component."""
    if not tensor.is_nested:
        return (_flat(tensor, buffers),)
    return tuple(_flat(part, buffers) if isinstance(part, Tensor) else part for part in Jagged.from_tensor(tensor))


def _unsplit(parts: tuple[Any, ...]) -> Tensor:
    if len(parts) == 1:
        return _unflat(parts[0])
    values, offsets, lengths, dim = parts
    return Jagged(_unflat(values), _unflat(offsets), None if lengths is None else _unflat(lengths), dim).nested()


def _flat(tensor: Tensor, buffers: bool) -> Any:
    """The bytes of a tensor on the CPU, its dtype and its shape. Other tensors are not changed."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return tensor
    flat: Any = tensor.resolve_conj().resolve_neg().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    if not flat.numel():
        flat = None
    elif buffers:
        flat = pickle.PickleBuffer(flat.numpy())
    elif flat.nbytes != flat.untyped_storage().nbytes():
        flat = flat.clone()  # pickling a view would include all of the memory behind it
    return flat, tensor.dtype, tuple(tensor.shape)


def _unflat(flat: Any) -> Tensor:
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
