"""What was found for a stage, in words."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlprims._json import beside
from rlprims._near import OTHER_WORDS
from rlprims.algorithms import BoundFunction, use
from rlprims.data_proto import DataProto
from rlprims.grouping import dense_ids

Data: TypeAlias = Mapping[str, Tensor]
TEXTS = beside(__file__, "_texts.json")
"""By hyperparameter the rows that ``decide`` its value; by code the page of a check."""


@dataclass(frozen=True)
class Found:
    """The formula of a stage: ``parts`` are the fields of an ``Algorithm``, empty if no formula fits."""

    parts: Mapping[str, Any]
    said: str
    """One line: the formula, or the nearest one and where it differs."""
    undecided: Mapping[str, tuple[Any, ...]]
    """Other values that give the same numbers on this batch, by hyperparameter."""

    def __str__(self) -> str:
        lines = ""
        for name, values in self.undecided.items():
            decides = f"; {TEXTS['decides'][name]} would decide" if name in TEXTS["decides"] else ""
            lines += f"\n  {name} may be {' or '.join(map(str, values))} as well{decides}"
        return self.said + lines


def tensors_of(batch: DataProto | Mapping[str, Any]) -> dict[str, Tensor]:
    """The batch's tensors by the names of this library (TRL's and verl's are read), with dense group ids."""
    fields = {**dict(batch.batch.items()), **batch.non_tensor_batch} if isinstance(batch, DataProto) else batch
    named = {**{OTHER_WORDS.get(name, name): x for name, x in fields.items()}, **fields}
    data = {name: x.detach().cpu() for name, x in named.items() if isinstance(x, Tensor) and not x.is_nested}
    data |= {name: torch.tensor(x) for name, x in named.items() if isinstance(x, (int, float))}
    mask = data.get("response_mask")
    if mask is None or mask.dim() != 2:
        raise ValueError(f"expected response_mask (B, T), got {None if mask is None else tuple(mask.shape)}")
    data["response_mask"] = mask = mask.bool()
    if "rm_scores" in data and "rewards" not in data:
        data["rewards"] = data["rm_scores"]
    if "advantages" in data and data["advantages"].dim() == 1:
        data["advantages"] = data["advantages"][:, None].expand(mask.shape)
    per_token = {"log_probs", "old_log_probs", "losses", "gradients", "advantages"} & data.keys()
    for name in (name for name in sorted(per_token) if data[name].shape != mask.shape):
        raise ValueError(f"{name} has shape {tuple(data[name].shape)}, expected {tuple(mask.shape)}, as response_mask")
    return data | {name: dense_ids(named[name]) for name in ("group_ids", "trajectory_ids") if name in named}


def whole(data: Data) -> Tensor:
    """(B,): the number of each row's group, or of its trajectory: rows that stay together."""
    mask = data["response_mask"]
    return data.get("group_ids", data.get("trajectory_ids", torch.arange(len(mask))))


def telling_rows(data: Data, size: Tensor) -> Tensor:
    """The rows of the groups with the largest ``size`` (B,), of about 2,048 tokens."""
    ids, mask = whole(data), data["response_mask"]
    largest = torch.zeros(int(ids.max()) + 1, dtype=size.dtype).scatter_reduce(0, ids, size, "amax")
    order = largest.argsort(descending=True)
    tokens = torch.zeros(len(order), dtype=torch.int64).index_add(0, ids, mask.sum(1))[order].cumsum(0)
    return torch.isin(ids, order[: 1 + int((tokens < 2048).sum())]).nonzero()[:, 0]


def parts(data: Data) -> list[Tensor]:
    """All rows, in parts of whole groups with about 32,768 places each."""
    ids, mask = whole(data), data["response_mask"]
    count = min(int(ids.max()) + 1, mask.numel() // 32768 + 1)
    found = [(ids % count == part).nonzero()[:, 0] for part in range(count)]
    return [rows for rows in found if mask[rows].any()]


def rows_of(data: Data, rows: Tensor) -> dict[str, Tensor]:
    """Some rows of a step, with dense ids."""
    of_step = len(data["response_mask"])
    some = {name: x[rows] if x.dim() and len(x) == of_step else x for name, x in data.items()}
    return some | {name: dense_ids(some[name]) for name in ("group_ids", "trajectory_ids") if name in some}


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest number wanted; infinite if one of them is not finite."""
    apart = (found - wanted).abs_().max() / torch.maximum(wanted.max(), -wanted.min()).clamp(min=1e-30)
    return float(apart.nan_to_num(nan=torch.inf))


def simplest(fitting: Iterable[BoundFunction]) -> tuple[BoundFunction, dict[str, tuple[Any, ...]]]:
    """The use with the fewest values that are not defaults, and what else it may be."""
    by_cost = sorted(fitting, key=lambda part: len(changed(part)))
    return plain(by_cost[0]), worded(by_cost[0], by_cost)


def worded(best: BoundFunction, fitting: Iterable[BoundFunction]) -> dict[str, tuple[Any, ...]]:
    """By hyperparameter the values, and the functions, that give the same numbers as the best."""
    others: dict[str, dict[Any, None]] = {}
    for part in fitting:
        if part.fn is not best.fn:
            others.setdefault("the function", {})[part.path.removeprefix("rlprims.")] = None
            continue
        for name, value in part.hyperparameters.items():
            if value != best.hyperparameters[name]:
                others.setdefault(name, {})[value] = None
    return {name: tuple(values) for name, values in others.items()}


def changed(part: BoundFunction) -> dict[str, Any]:
    """Its hyperparameters that differ from the defaults."""
    defaults = use(part.fn).hyperparameters
    return {name: value for name, value in part.hyperparameters.items() if defaults.get(name, ...) != value}


def plain(part: BoundFunction) -> BoundFunction:
    """The same use, with only those bound."""
    return use(part.fn, **changed(part))
