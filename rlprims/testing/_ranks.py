"""Ranks as threads of one process: collectives without a process group, fast enough for hundreds of random splits."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

SECONDS = 60.0  # that a rank waits for the others


@dataclass(frozen=True)
class Rank:
    """One of several ranks, each in its own thread. Its methods are the callables that the library's functions take."""

    index: int
    count: int
    _exchange: "_Exchange"

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        return torch.stack(self._exchange.exchange(self.index, "all_reduce", x)).sum(0)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The largest over the ranks, element by element."""
        return torch.stack(self._exchange.exchange(self.index, "all_reduce_max", x)).amax(0)

    def all_gather(self, x: Tensor) -> Tensor:
        """(R, ...): the tensors of all ranks in their order."""
        return torch.stack(self._exchange.exchange(self.index, "all_gather", x))

    def all_gather_objects(self, x: Any) -> list[Any]:
        """The objects of all ranks in their order, for example a tracker's numbers by name."""
        return self._exchange.exchange(self.index, "all_gather_objects", x)


class _Exchange:
    """The exchange between the ranks of one run: each rank passes an object and gets a copy of every rank's."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._calls: list[tuple[str, Any]] = [("nothing", None)] * ranks

    def exchange(self, index: int, name: str, x: Any) -> list[Any]:
        self._calls[index] = (f"{name} of {_described(x)}", x)
        self._barrier.wait(SECONDS)
        calls = list(self._calls)
        self._barrier.wait(SECONDS)
        if len({call for call, _ in calls}) > 1:
            made = ", ".join(f"rank {i} {call}" for i, (call, _) in enumerate(calls))
            raise RuntimeError(f"the ranks make different calls: {made}; expected the same calls in the same order")
        return [x.detach().clone() if isinstance(x, Tensor) else x for _, x in calls]

    def leave(self) -> None:
        self._barrier.abort()


def _described(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def on_ranks(function: Callable[..., Result], *per_rank: Sequence[Any]) -> list[Result]:
    """Call ``function(rank, *arguments)`` on several ranks at once, and return the results in the ranks' order.

    A rank is a thread, so a test needs no process group. If a rank raises, the others end too. It is an error if the
    ranks do not make the same calls in the same order; on a cluster they would wait for ever.

    >>> def mean(rank, x):
    ...     return rank.all_reduce(x) / rank.count
    >>> on_ranks(mean, [torch.tensor(1.0), torch.tensor(3.0)])
    [tensor(2.), tensor(2.)]
    """
    count = len(per_rank[0])
    exchange = _Exchange(count)

    def run(index: int) -> Result:
        try:
            result = function(Rank(index, count, exchange), *(arguments[index] for arguments in per_rank))
            exchange.exchange(index, "has ended", None)
        except BaseException:
            exchange.leave()
            raise
        return result

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, index) for index in range(count)]
    errors = [error for future in futures if (error := future.exception())]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
