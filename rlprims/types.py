"""The shapes that the signatures name, and the few value types that cross rooms.

B sequences, T response positions, N packed tokens. A per-token tensor is padded ``(B, T)``, or packed ``(N,)`` with
``cu_seqlens`` (B+1,) saying where each sequence begins and ends, as in variable-length attention.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeAlias

from torch import Tensor

PerToken: TypeAlias = Annotated[Tensor, "float (B, T) or (N,)"]
PerSequence: TypeAlias = Annotated[Tensor, "float (B,)"]
TokenMask: TypeAlias = Annotated[Tensor, "bool (B, T) or (N,)"]
RowMask: TypeAlias = Annotated[Tensor, "bool (B,)"]
GroupIds: TypeAlias = Annotated[Tensor, "int64 (B,), dense: see grouping.dense_ids"]
CuSeqlens: TypeAlias = Annotated[Tensor, "int (B+1,)"]
Scalar: TypeAlias = Annotated[Tensor, "float ()"]


class Totals(NamedTuple):
    """How much one optimizer step trains on: the denominators of every mean, whatever the micro-batches are."""

    tokens: Tensor | int
    sequences: Tensor | int
    groups: Tensor | int


@dataclass(frozen=True)
class Mean:
    """A mean that has not been divided yet, so that parts add up exactly: sum the totals, sum the counts."""

    total: Tensor
    count: Tensor

    def merge(self, other: "Metric") -> "Mean":
        if not isinstance(other, Mean):
            raise TypeError(f"a mean cannot be merged with {other}")
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> Tensor:
        """total / count; 0 where nothing was counted."""
        return self.total / self.count.clamp(min=1)


@dataclass(frozen=True)
class Max:
    """A maximum over parts."""

    largest: Tensor

    def merge(self, other: "Metric") -> "Max":
        if not isinstance(other, Max):
            raise TypeError(f"a maximum cannot be merged with {other}")
        return Max(self.largest.maximum(other.largest))

    def value(self) -> Tensor:
        return self.largest


Metric: TypeAlias = Mean | Max
Metrics: TypeAlias = dict[str, Metric]


def merge_metrics(*parts: Metrics) -> Metrics:
    """The metrics of the whole from those of its parts.

    >>> import torch
    >>> half = {"loss": Mean(torch.tensor(1.0), torch.tensor(2))}
    >>> merge_metrics(half, half)["loss"].value()
    tensor(0.5000)
    """
    merged: Metrics = {}
    for part in parts:
        merged |= {name: merged[name].merge(metric) if name in merged else metric for name, metric in part.items()}
    return merged
