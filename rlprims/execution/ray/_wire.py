"""Send weights from rank 0 to every process of the engines with gloo, one layer at a time, packed in one buffer.

Rank 0 starts a store, and creates a process group with all receivers, which later transfers use, too. If a transfer
breaks, the next one opens new connections, and sends all weights again.
"""

import itertools
import math
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from rlprims.execution.hf._adapters import sum_of_bits

dist: Any = torch.distributed  # some of its names are not typed

Sums = dict[str, tuple[int, int]]
"""The number of elements and the checksum of each tensor, by its name."""

_ALIGNED = 16


class Info(NamedTuple):
    """The description of a tensor that will be sent."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def bytes(self) -> int:
        size: int = math.prod(self.shape) * getattr(torch, self.dtype).itemsize
        return size


@dataclass
class Endpoint:
    """The address that a receiver connects to, and its rank in the group. The sender has rank 0."""

    host: str
    port: int
    rank_offset: int
    size: int
    timeout: float


def layers(names: Sequence[str]) -> list[list[str]]:
    """Group the names by decoder layer. Names before and after the layers are groups, too. The order stays.

    >>> layers(["embed.weight", "layers.0.q.weight", "layers.0.k.weight", "layers.1.q.weight", "norm.weight"])
    [['embed.weight'], ['layers.0.q.weight', 'layers.0.k.weight'], ['layers.1.q.weight'], ['norm.weight']]
    """

    def layer(name: str) -> str:
        found = re.match(r"(.*?\.\d+)\.", name)
        return found[1] if found else ""

    return [list(part) for _, part in itertools.groupby(names, key=layer)]


def checksums(tensors: Mapping[str, Tensor]) -> Sums:
    return {name: (tensor.numel(), sum_of_bits(tensor)) for name, tensor in tensors.items()}


class Sender:
    """The sender, on rank 0. While it waits it calls ``heed``, which must raise an error if an engine has failed."""

    def __init__(self, host: str, timeout: float, heed: Callable[[], None] = lambda: None) -> None:
        self.limit, self.heed = timedelta(seconds=timeout), heed
        listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = listener.getsockname()[:2]
        mine = {"is_master": True, "master_listen_fd": listener.detach(), "wait_for_workers": False}
        self.store: Any = dist.TCPStore(*self.address, timeout=self.limit, **mine)
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
        """Pack a part, wait for the previous one, and begin to send; now the next can be gathered. Returns sums."""
        flat = torch.zeros(_size(part), dtype=torch.uint8)
        sent = _views(flat, part)
        for info, tensor in zip(part, tensors, strict=True):
            sent[info.name].copy_(tensor.detach())  # this casts to the dtype of the engine
        self.finish()
        self.flying = self.group.broadcast(flat, 0)
        return checksums(sent)

    def finish(self) -> None:
        """Wait until the last part is sent."""
        while self.flying is not None and not self.flying.is_completed():
            self.heed()
            time.sleep(2e-4)
        if self.flying is not None:
            self.flying.wait()
        self.flying = None

    def close(self) -> None:
        """Close the connections. Processes that still wait for data get an error."""
        self.flying = self.group = self.store = None


class Receiver:
    """The receiver, in one process of an engine."""

    def __init__(self, endpoint: Endpoint) -> None:
        rank, limit = endpoint.rank_offset, timedelta(seconds=endpoint.timeout)
        soon = min(limit, timedelta(seconds=30))  # the sender listens already, so a long wait would not help
        self.store = dist.TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=soon)
        self.store.set_timeout(limit)
        self.store.set(f"here/{rank}", "")
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("weights", self.store), rank, endpoint.size, limit)

    def parts(self, infos: Sequence[Sequence[Sequence[Any]]]) -> Iterator[dict[str, Tensor]]:
        """Receive the parts one after another; yields the tensors of each by name. Each part has its own buffer."""
        for part in infos:
            yield self._part([Info(*info) for info in part])  # no variable, which would keep the buffer alive

    def _part(self, part: Sequence[Info]) -> dict[str, Tensor]:
        flat = torch.empty(_size(part), dtype=torch.uint8)
        self.group.broadcast(flat, 0).wait()
        return _views(flat, part)


def _room(info: Info) -> int:
    """The bytes of a tensor in a buffer, rounded up, because views of other dtypes must be aligned."""
    return -(-info.bytes // _ALIGNED) * _ALIGNED


def _size(part: Sequence[Info]) -> int:
    """The bytes of a packed part."""
    return sum(map(_room, part))


def _views(flat: Tensor, part: Sequence[Info]) -> dict[str, Tensor]:
    """Return the tensors of a packed part, by name, as views of its bytes."""
    pieces = torch.split(flat, [_room(info) for info in part])
    return {
        info.name: piece[: info.bytes].view(getattr(torch, info.dtype)).view(info.shape)
        for info, piece in zip(part, pieces, strict=True)
    }


def differences(sent: Sums, held: Sequence[Sums], fused: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of an engine's tensors that differ from the sent tensors.

    ``held`` has the checksums in each process of the engine, by the engine's names: of a whole tensor or of a shard of
    it. A tensor that the engine packed into another layout is empty there, and is not compared. ``fused`` has the sent
    names that are joined in one of the engine's names, by the joined name, such as qkv_proj.
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
    """Return whether the processes' pieces of a parameter add up to the sent tensors that it joins."""
    numbers, totals = ([part[i] for part in parts] for i in range(2))
    if all(total == sum(totals) for _, total in held):  # each process has the whole; rows of zeros may have been added
        return True
    have = sum(n for n, _ in held)
    if have < sum(numbers):
        return True  # the engine packed it into another layout: it cannot be compared
    # The processes have shards. If there are fewer key heads than processes, several processes have the same head.
    times, rest = divmod(have - numbers[0], sum(numbers[1:])) if len(parts) > 1 else (1, 0)
    several = times if times > 1 and rest == 0 else 1
    expected = totals[0] + several * sum(totals[1:])
    return (sum(total for _, total in held) - expected) % 2**64 == 0  # sums of 64-bit integers overflow
