"""Random batches with every name of the vocabulary, difficult on purpose, and changes that must not change a result.

Rows are ragged and end in padding; some begin with padding, some have tool tokens inside, one has a single token and
one has none. Groups have several sizes, in mixed order: 3, 2, 1 and 2 rows in the toy batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._json import beside
from rlprims.grouping import dense_ids

Layout = Literal["token", "row"]
Normal: TypeAlias = Callable[..., Tensor]

VOCABULARY: Mapping[str, Layout] = {
    name: layout for layout, names in beside(__file__, "_vocabulary.json").items() for name in names
}
"""The data that a primitive may have as parameters, in addition to ``cu_seqlens`` and ``totals``."""

TOY, LARGE = (8, 6), (64, 128)
"""The two sizes (rows, columns) at which the laws are tested, so that code that depends on the size is noticed."""

_VOCABULARY_SIZE, _TOP = 7, 3
_PRIVATE: Mapping[str, Layout] = {
    **{"token_ids": "token", "token_cotangent": "token"},
    **{"row_cotangent": "row", "lengths": "row"},
}
_PATTERNS = ("111011", "111100", "100000", "000000", "001110", "101101", "111111", "011000")
_GROUPS = (0, 0, 0, 1, 1, 2, 3, 3)
_GROUP_SIZES = (1, 5, 2, 8, 3)
_IDS = ("group_ids", "trajectory_ids")
_JUNK = 7.0


def layout_of(name: str) -> Layout:
    return VOCABULARY[name] if name in VOCABULARY else _PRIVATE[name]


class _OnDemand(Mapping[str, Tensor]):
    """Tensors that are computed when they are first read. A primitive reads five of eighty."""

    def __init__(self, names: Iterable[str], compute: Callable[[str], Tensor]) -> None:
        self._names, self._compute, self._known = dict.fromkeys(names), compute, dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._known:
            self._known[name] = self._compute(name)
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class Batch:
    """A tensor for every name of the vocabulary, padded; or packed, and then with ``cu_seqlens``."""

    data: Mapping[str, Tensor]

    @property
    def mask(self) -> Tensor:
        return self.data["response_mask"]

    @property
    def packed(self) -> bool:
        return "cu_seqlens" in self.data

    def replace(self, **data: Tensor) -> "Batch":
        names = {**dict.fromkeys(self.data), **dict.fromkeys(data)}
        return Batch(_OnDemand(names, lambda name: data[name] if name in data else self.data[name]))

    def map(self, tokens: Callable[[Tensor], Tensor], rows: Callable[[Tensor], Tensor]) -> "Batch":
        """The same change to every per-token and every per-row tensor."""
        return self.each(lambda name, x: (tokens if layout_of(name) == "token" else rows)(x))

    def each(self, change: Callable[[str, Tensor], Tensor]) -> "Batch":
        """A change that knows the name of each tensor."""
        return Batch(_OnDemand(self.data, lambda name: change(name, self.data[name])))

    def rows(self, index: Tensor) -> "Batch":
        return self.map(lambda x: x[index], lambda x: x[index])

    def pad(self, left: int, right: int) -> "Batch":
        """Add masked columns. The number in them must not change any result."""

        def widen(x: Tensor) -> Tensor:
            fill = 0.0 if x.dtype is torch.bool else _JUNK
            sides = (x.new_full((len(x), columns, *x.shape[2:]), fill) for columns in (left, right))
            return torch.cat([next(sides), x, next(sides)], dim=1)

        padded = self.map(widen, lambda x: x)
        return padded.replace(lengths=padded.data["lengths"] + left)

    def pack(self) -> "Batch":
        """The same sequences concatenated, each cut at its length, with ``cu_seqlens``."""
        lengths = self.data["lengths"]
        packed = self.map(lambda x: pack_tokens(x, lengths), lambda x: x)
        return packed.replace(cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))

    def relabel(self, names: Tensor, ids: str = "group_ids") -> "Batch":
        return self.replace(**{ids: names[self.data[ids]]})

    def to(self, dtype: torch.dtype) -> "Batch":
        return self.each(lambda _, x: x.to(dtype) if x.is_floating_point() else x)

    def on(self, device: str) -> "Batch":
        return self.each(lambda _, x: x.to(device))

    def without_tokens(self) -> "Batch":
        """The batch with no valid token."""
        return self.replace(response_mask=torch.zeros_like(self.mask))

    def without_empty_rows(self) -> "Batch":
        """The batch without rows that have no valid token; groups and rollouts are numbered again."""
        kept = self.rows(self.mask.any(-1))
        return kept.replace(**{name: dense_ids(kept.data[name]) for name in _IDS})


def pack_tokens(x: Tensor, lengths: Tensor) -> Tensor:
    """The first ``lengths`` columns of each row, concatenated."""
    return x[torch.arange(x.shape[1], device=x.device) < lengths[:, None]]


def merge(first: Batch, second: Batch) -> Batch:
    """The rows of both batches; their groups and rollouts get different ids."""
    width = max(first.mask.shape[1], second.mask.shape[1])
    a, b = (batch.pad(0, width - batch.mask.shape[1]) for batch in (first, second))
    b = b.replace(**{name: b.data[name] + len(a.mask) for name in _IDS})
    return Batch(_OnDemand(a.data, lambda name: torch.cat([a.data[name], b.data[name]])))


def make_batches(seeds: Iterable[int], dtype: torch.dtype = torch.float64) -> Iterator[Batch]:
    """A toy batch for each seed, and one large batch."""
    for seed in seeds:
        yield make_batch(seed, dtype)
    yield make_batch(0, dtype, *LARGE)


def _toy_mask(width: int, generator: torch.Generator) -> Tensor:
    patterns = torch.tensor([[mark == "1" for mark in pattern] for pattern in _PATTERNS])
    mask = torch.zeros(TOY[0], max(width, patterns.shape[1]), dtype=torch.bool)
    mask[:, : patterns.shape[1]] = patterns
    return mask[torch.randperm(TOY[0], generator=generator), :width]


def _mask(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Ragged rows with gaps; one is full, one has a single token and one has none."""
    columns = torch.arange(width)
    ends = torch.randint(1, width + 1, (rows, 1), generator=generator)
    begins = (torch.rand(rows, 1, generator=generator) < 0.2) * ends // 2
    gaps = (torch.rand(rows, width // 3 + 1, generator=generator) < 0.2).repeat_interleave(3, dim=-1)[:, :width]
    mask = (columns >= begins) & (columns < ends) & ~gaps
    mask[0], mask[1], mask[2] = True, columns == 0, False
    return mask[torch.randperm(rows, generator=generator)]


def make_batch(
    seed: int,
    dtype: torch.dtype = torch.float64,
    rows: int = TOY[0],
    width: int = TOY[1],
    *,
    integers: int | None = None,
) -> Batch:
    """A batch of (``rows``, ``width``) tokens; the same seed gives the same batch.

    ``integers``: another seed for all tensors that are not floats, so that two batches have the same packed layout.
    """
    batch = _make_batch(seed, rows, width)
    if integers is not None:
        floats = {name: x for name, x in batch.data.items() if x.is_floating_point()}
        batch = _make_batch(integers, rows, width).replace(**floats)
    return batch.each(lambda _, x: x.to(dtype if x.is_floating_point() else x.dtype, copy=True))


@lru_cache(maxsize=64)
def _make_batch(seed: int, rows: int, width: int) -> Batch:
    """A batch in float64. It is cached, so the caller must copy it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    data = _tokens_and_rows(rows, width, generator, normal)
    data |= _policies(data, generator, normal)
    data |= _distributions(data["old_log_probs"], generator, normal)
    data |= _turns(data["old_log_probs"], generator, normal)
    data |= _rollouts(data["response_mask"], data["group_ids"], generator)
    data |= {name: normal(rows) for name in ("reward_shift", "chosen_scores", "rejected_scores", "score_margins")}
    data["token_ids"] = torch.randint(_VOCABULARY_SIZE, (rows, width), generator=generator)
    return Batch(data)


def _tokens_and_rows(rows: int, width: int, generator: torch.Generator, normal: Normal) -> dict[str, Tensor]:
    """Masks, groups, and what most functions read."""
    toy = rows == TOY[0]
    mask = _toy_mask(width, generator) if toy else _mask(rows, width, generator)
    sizes = torch.tensor(_GROUP_SIZES).repeat(rows)[:rows]
    group_ids = torch.tensor(_GROUPS) if toy else torch.arange(rows).repeat_interleave(sizes)[:rows]
    group_ids = group_ids[torch.randperm(rows, generator=generator)]
    columns = torch.arange(1, width + 1)
    needed = (mask * columns).amax(-1) if width else mask.sum(-1)
    spare = torch.rand(rows, generator=generator) * (width - needed + 1)
    tokens = torch.zeros(rows, dtype=torch.int64).index_add(0, group_ids, mask.sum(-1))
    shape = (rows, width)
    old = -normal(*shape).abs() - 0.1
    values = normal(*shape)
    return {
        "response_mask": mask,
        "log_probs": old + normal(*shape),
        "old_log_probs": old,
        "rollout_log_probs": old + normal(*shape) / 10,
        "ref_log_probs": old + normal(*shape),
        "entropies": normal(*shape).abs(),
        "rewards": normal(*shape),
        "values": values,
        "new_values": values + normal(*shape),
        "returns": normal(*shape),
        "advantages": normal(*shape),
        "losses": normal(*shape),
        "scores": normal(rows),
        "baseline_scores": normal(rows),
        "bootstrap_values": normal(rows),
        "group_ids": group_ids,
        "group_tokens": tokens[group_ids],
        "valid_rows": torch.rand(rows, generator=generator) < 0.7,
        "token_cotangent": normal(*shape),
        "row_cotangent": normal(rows),
        "lengths": needed + spare.long(),
    }


def _policies(data: dict[str, Tensor], generator: torch.Generator, normal: Normal) -> dict[str, Tensor]:
    """More of the sampled tokens' distributions."""
    pi = data["old_log_probs"].exp()
    rows, shape = len(pi), pi.shape
    return {
        "whole_log_probs": data["log_probs"] - data["entropies"],  # at most those within the kept sets
        "sum_pi_squared": pi.square() + (1 - pi).square() * torch.rand(shape, generator=generator, dtype=torch.float64),
        "importance_weights": normal(*shape).exp(),
        "turn_ids": (torch.rand(shape, generator=generator) < 0.4).cumsum(-1),
        "component_scores": normal(rows, 2),
    }


def _distributions(old: Tensor, generator: torch.Generator, normal: Normal) -> dict[str, Tensor]:
    """Logits, teachers, and pairs."""
    rows, shape = len(old), old.shape
    logits, teacher_logits = 2 * normal(*shape, _VOCABULARY_SIZE), 2 * normal(*shape, _VOCABULARY_SIZE)
    top = teacher_logits.topk(_TOP, dim=-1).indices
    pairs = ("chosen", "rejected", "ref_chosen", "ref_rejected", "sequence", "ref_sequence")
    return {
        "teacher_log_probs": old + normal(*shape),
        "logits": logits,
        "ref_logits": logits + normal(*shape, _VOCABULARY_SIZE),
        "teacher_logits": teacher_logits,
        "router_logits": torch.stack([logits, teacher_logits], -2),
        "topk_log_probs": logits.log_softmax(-1).gather(-1, top),
        "teacher_topk_log_probs": teacher_logits.log_softmax(-1).gather(-1, top),
        **{f"{name}_log_probs": -2 * normal(rows).abs() - 0.1 for name in pairs},
        "baseline_kl": normal(rows).abs(),
        "desirable": torch.rand(rows, generator=generator) < 0.5,
    }


def _turns(old: Tensor, generator: torch.Generator, normal: Normal) -> dict[str, Tensor]:
    """What turns and their environment return."""
    rows, shape = len(old), old.shape
    return {
        "state_ids": torch.randint(3, shape, generator=generator),
        "responses": torch.randint(2, shape, generator=generator),
        "potentials": normal(*shape),
        # Codes of Ended: about six of ten are 0, "stop".
        "ended": (17.5 * torch.rand(rows, generator=generator) - 9.5).clamp(min=0).to(torch.int8),
        "turn_rewards": normal(*shape),
        "action_ids": torch.randint(2, shape, generator=generator),
        "process_rewards": normal(*shape),
        "process_log_probs": old + normal(*shape),
        "continuation_values": normal(*shape),
        "tree_ids": torch.randint(2, (rows,), generator=generator),
        "context_lengths": torch.randint(1, 40, (rows,), generator=generator),
    }


def _rollouts(mask: Tensor, group_ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Rollouts of several rows: the rows of a group belong to one or two of them."""
    rows, shape = len(mask), mask.shape
    ids = dense_ids(2 * group_ids + torch.randint(2, (rows,), generator=generator))
    return {
        "versions": torch.randint(3, shape, generator=generator),
        "observation_mask": ~mask & (torch.rand(shape, generator=generator) < 0.7),
        "expert_mask": torch.rand(shape, generator=generator) < 0.4,
        "row_tokens": mask.sum(-1),
        "trajectory_ids": ids,
        "trajectory_tokens": torch.zeros(rows, dtype=torch.int64).index_add(0, ids, mask.sum(-1))[ids],
    }
