"""Groups of samples of one prompt: the order in which they begin, and the interface of what samples them."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rlprims.data_proto import DataProto
from rlprims.filters import DifficultyPools, SamplingExhausted
from rlprims.runs.rows import RowOrder
from rlprims.trainer.data import Example
from rlprims.trainer.sources.settings import SamplingSettings

TURN = 2**40
"""A turn is drawn as sample ``sample_id + turn * TURN``, by (seed, sample, turn); the first like a lone response."""


class Group(NamedTuple):
    """The samples of one example."""

    number: int
    example: Example
    samples: range
    row: int = 0
    """The number of the example in the data."""


def example_columns(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """The columns of rows that come from their examples."""
    names = {name: name for name in ("question", "answer", "data_source", "fields")} | {"example": "key"}
    return {column: [getattr(example, name) for example in examples] for column, name in names.items()}


class GroupSource(Protocol):
    """What samples groups. Groups begin at any time, and are complete in any order."""

    def begin(self, group: Group) -> None: ...

    def take(self) -> dict[int, DataProto]:
        """Wait until a group is complete; returns the rows of all complete ones by number, with the source's scores."""
        ...

    def close(self) -> None:
        """Abort the groups that are not complete."""
        ...


def take_round(source: GroupSource, groups: Sequence[Group]) -> DataProto:
    """The rows of these groups, in their order, from a source of whole rounds, which is then closed."""
    with closing(source):
        for group in groups:
            source.begin(group)
        rows = source.take()
    return DataProto.concat([rows[group.number] for group in groups])


class Prompts:
    """The groups of a run, in the order in which they begin: in epochs, or drawn by the solve rates of their prompts.

    ``groups`` and ``samples`` have begun; both are numbered from 0. The whole state is ``state_dict``.
    """

    def __init__(self, config: SamplingSettings, examples: Sequence[Example]) -> None:
        self.examples, self.seed, self.group_size = examples, config.seed, config.algorithm.group_size
        self.order = RowOrder(len(examples), seed=config.seed, shuffle=config.data.shuffle)
        self.pools = DifficultyPools(config.data.pools) if config.data.pools else None
        self.by_key = {example.key: row for row, example in enumerate(examples)} if self.pools else {}
        self.groups = 0
        self.samples = 0

    def begin(self, numbers: Sequence[int]) -> list[Group]:
        """The next groups, with these numbers."""
        rows = self._draw(len(numbers)) if numbers else []
        self.groups += len(numbers)
        pairs = zip(numbers, rows, strict=True)
        return [self.group(number, row, self.next_samples(self.group_size).start) for number, row in pairs]

    def group(self, number: int, row: int, first_sample: int) -> Group:
        return Group(number, self.examples[row], range(first_sample, first_sample + self.group_size), row)

    def next_samples(self, count: int) -> range:
        """The numbers of the next samples."""
        self.samples += count
        return range(self.samples - count, self.samples)

    def _draw(self, count: int) -> list[int]:
        """The rows of the next prompts, in the order of the epoch or drawn by the weights of their pools."""
        begun = self.order.position
        drawn = self.order.take(count)
        if self.pools is None:
            return drawn
        bits = np.random.Philox(key=np.array([self.seed, 2**61 + begun], dtype=np.uint64))
        generator = torch.Generator().manual_seed(int(bits.random_raw()) >> 1)
        try:
            keys = self.pools.draw(list(self.by_key), count, generator=generator)
        except ValueError as error:
            raise SamplingExhausted(f"data.pools: {error}. Give a pool more weight, or sample fewer") from None
        return [self.by_key[key] for key in keys]

    def observe(self, sampled: DataProto) -> None:
        """Update the pools with the solve rate of each prompt: the mean of ``acc``, or of the score."""
        if self.pools is None:
            return
        correct, keys = sampled["acc"] if "acc" in sampled else sampled["scores"], sampled["example"]
        rates = {key: correct[torch.tensor((keys == key).tolist())] for key in dict.fromkeys(keys.tolist())}
        finite = {key: rate[rate.isfinite()] for key, rate in rates.items()}
        self.pools.observe({key: float(rate.mean()) for key, rate in finite.items() if len(rate)})

    def metrics(self) -> dict[str, float]:
        """The number of prompts in each pool."""
        if self.pools is None:
            return {}
        pool_of = Counter(self.pools.pool(key) or "unseen" for key in self.by_key)
        return {f"pools/{name}": pool_of[name] for name in (*self.pools.pools, "unseen")}

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON values."""
        pools = {"pools": self.pools.state_dict()} if self.pools else {}
        return {"samples": self.samples, "groups": self.groups, "prompt_position": self.order.position, **pools}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples, self.groups, self.order.position = state["samples"], state["groups"], state["prompt_position"]
        if self.pools is not None:
            self.pools.load_state_dict(state["pools"])
