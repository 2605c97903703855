"""Weights from rank 0 to every process of the engines: a layer at a time, packed in one buffer, by gloo.

Each transfer has its own connection: a store that rank 0 keeps, and a process group of rank 0 and all receivers. If it
breaks, some engines have a part of the weights, which the next transfer replaces; nothing else is left of it.
"""

import itertools
import math
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed  # some of its names are not typed

Sums = dict[str, tuple[int, int]]
"""By a tensor's name how many numbers it has, and its checksum."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALIGNED = 16


class Info(NamedTuple):
    """A tensor to come."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def bytes(self) -> int:
        size: int = math.prod(self.shape) * getattr(torch, self.dtype).itemsize
        return size


class Endpoint(NamedTuple):
    """Where a receiver connects, and which of the group it is; rank 0 sends."""

    host: str
    port: int
    rank_offset: int
    size: int
    timeout: float


def layers(names: Sequence[str]) -> list[list[str]]:
    """The names in their order, those of one decoder layer together, and those before and after the layers.

    >>> layers(["embed.weight", "layers.0.q.weight", "layers.0.k.weight", "layers.1.q.weight", "norm.weight"])
    [['embed.weight'], ['layers.0.q.weight', 'layers.0.k.weight'], ['layers.1.q.weight'], ['norm.weight']]
    """

    def layer(name: str) -> str:
        found = re.match(r"(.*?\.\d+)\.", name)
        return found[1] if found else ""

    return [list(part) for _, part in itertools.groupby(names, key=layer)]


def checksum(tensor: Tensor) -> int:
    """The sum of its bits as integers: the same in parts, whatever their order, and for zeros that are added."""
    flat = tensor.detach().contiguous()
    bits = flat.view(_BITS[flat.element_size()])
    if bits.device.type == "cpu":  # numpy adds small integers ten times as fast as torch
        return int(bits.numpy().sum(dtype=np.int64))
    return int(bits.sum(dtype=torch.int64))


def checksums(tensors: Mapping[str, Tensor]) -> Sums:
    return {name: (tensor.numel(), checksum(tensor)) for name, tensor in tensors.items()}


class Sender:
    """Rank 0's end of a transfer.

    While it waits it calls ``heed``, which raises an error if nobody can answer any more.
    """

    def __init__(self, host: str, timeout: float, heed: Callable[[], None] = lambda: None) -> None:
        self.limit, self.heed = timedelta(seconds=timeout), heed
        listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.store: Any = dist.TCPStore(
            *self.address,
            is_master=True,
            master_listen_fd=listener.detach(),
            wait_for_workers=False,
            timeout=self.limit,
        )
        self.flying: Any = None
        self.group: Any = None

    def connect(self, receivers: int) -> None:
        """Wait for all receivers."""
        keys = [f"here/{rank}" for rank in range(1, receivers + 1)]
        end = time.monotonic() + self.limit.total_seconds()
        while not self.store.check(keys):
            self.heed()
            if time.monotonic() > end:
                raise TimeoutError(f"{receivers} receivers of weights: not all were here in time")
            time.sleep(1e-3)
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("weights", self.store), 0, receivers + 1, self.limit)

    def send(self, part: Sequence[Info], tensors: Sequence[Tensor]) -> Sums:
        """Begin to send a part when the one before it has arrived: this one was gathered meanwhile.

        Returns the checksums of what is sent.
        """
        flat = torch.zeros(_size(part), dtype=torch.uint8)
        sent = _views(flat, part)
        for info, tensor in zip(part, tensors, strict=True):
            sent[info.name].copy_(tensor.detach())  # in the dtype of the engine
        self.finish()
        self.flying = self.group.broadcast(flat, 0)
        return checksums(sent)

    def finish(self) -> None:
        """Wait until the last part has left."""
        while self.flying is not None and not self.flying.is_completed():
            self.heed()
            time.sleep(2e-4)
        if self.flying is not None:
            self.flying.wait()

    def close(self) -> None:
        """Close the connections; processes that still wait get an error."""
        self.flying = self.group = self.store = None


class Receiver:
    """An engine's end of a transfer, in one of its processes."""

    def __init__(self, endpoint: Endpoint) -> None:
        rank, limit = endpoint.rank_offset, timedelta(seconds=endpoint.timeout)
        # The sender listens already: a receiver that cannot connect soon is too late for this transfer.
        soon = min(limit, timedelta(seconds=30))
        self.store = dist.TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=soon)
        self.store.set_timeout(limit)
        self.store.set(f"here/{rank}", "")
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("weights", self.store), rank, endpoint.size, limit)

    def parts(self, infos: Sequence[Sequence[Sequence[Any]]]) -> Iterator[dict[str, Tensor]]:
        """Each part's tensors by name, in a buffer that is used for no other part."""
        for part in infos:
            yield self._part([Info(*info) for info in part])  # no name here keeps a buffer longer than its part

    def _part(self, part: Sequence[Info]) -> dict[str, Tensor]:
        flat = torch.empty(_size(part), dtype=torch.uint8)
        self.group.broadcast(flat, 0).wait()
        return _views(flat, part)


def _room(info: Info) -> int:
    """A view of another dtype must be aligned."""
    return -(-info.bytes // _ALIGNED) * _ALIGNED


def _size(part: Sequence[Info]) -> int:
    """Bytes of a part, packed."""
    return sum(map(_room, part))


def _views(flat: Tensor, part: Sequence[Info]) -> dict[str, Tensor]:
    """The tensors of a part, by name, as they lie one after the other in its bytes."""
    pieces = torch.split(flat, [_room(info) for info in part])
    return {
        info.name: piece[: info.bytes].view(getattr(torch, info.dtype)).view(info.shape)
        for info, piece in zip(part, pieces, strict=True)
    }


def differences(sent: Sums, held: Sequence[Sums], fused: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of an engine's tensors that differ from those that were sent.

    Args:
        sent: of whole tensors.
        held: of each of the engine's processes, under the engine's names. A tensor is whole in all of them or in
            shards; one that was packed into another layout is empty, and not compared.
        fused: the parts of a name that stands for several, such as qkv_proj.
    """
    wrong = []
    for name in held[0]:
        ends = [part for part in name.split(".") if part in fused]
        names = [name.replace(ends[0], one) for one in fused[ends[0]]] if ends else [name]
        if any(one not in sent for one in names):
            continue
        if not _same([sent[one] for one in names], [sums[name] for sums in held]):
            wrong.append(name)
    return wrong


def _same(parts: Sequence[tuple[int, int]], held: Sequence[tuple[int, int]]) -> bool:
    """Whether the processes' pieces are these whole tensors, one after the other in one parameter."""
    numbers, totals = ([part[i] for part in parts] for i in range(2))
    if all(total == sum(totals) for _, total in held):  # whole in each; rows of zeros may have been added
        return True
    have = sum(n for n, _ in held)
    if have < sum(numbers):
        return True  # packed into another layout: not compared
    # In shards. Where a model has fewer key heads than processes, each head is in several of them.
    times, rest = divmod(have - numbers[0], sum(numbers[1:])) if len(parts) > 1 else (1, 0)
    several = times if times > 1 and rest == 0 else 1
    return _wrapped(sum(total for _, total in held)) == _wrapped(totals[0] + several * sum(totals[1:]))


def _wrapped(number: int) -> int:
    """As a sum of 64 bits overflows."""
    return number & (2**64 - 1)
