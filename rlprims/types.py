"""The shapes that the signatures name, and the few value types that several packages share.

B sequences, T response positions, N packed tokens, P pairs, V vocabulary. A per-token tensor is padded ``(B, T)``, or
packed ``(N,)`` with ``cu_seqlens`` (B+1,) saying where each sequence begins and ends, as in variable-length attention.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

PerToken: TypeAlias = Annotated[Tensor, "float (B, T) or (N,)"]
PerTokenLogits: TypeAlias = Annotated[Tensor, "float (B, T, V) or (N, V)"]
PerSequence: TypeAlias = Annotated[Tensor, "float (B,)"]
ComponentScores: TypeAlias = Annotated[Tensor, "float (B, K)"]
PerPair: TypeAlias = Annotated[Tensor, "float (P,)"]
TokenMask: TypeAlias = Annotated[Tensor, "bool (B, T) or (N,)"]
RowMask: TypeAlias = Annotated[Tensor, "bool (B,)"]
GroupIds: TypeAlias = Annotated[Tensor, "int64 (B,), dense: see grouping.dense_ids"]
CuSeqlens: TypeAlias = Annotated[Tensor, "int (B+1,)"]
EndedCodes: TypeAlias = Annotated[Tensor, "int8 (B,), codes of ended.Ended"]
TrajectoryIds: TypeAlias = Annotated[Tensor, "int64 (B,), dense: see grouping.dense_ids"]
RowCounts: TypeAlias = Annotated[Tensor, "int (B,)"]
TreeIds: TypeAlias = Annotated[Tensor, "int (B,)"]
TurnIds: TypeAlias = Annotated[Tensor, "int (B, T) or (N,)"]
Versions: TypeAlias = Annotated[Tensor, "int (B, T) or (N,)"]
Scalar: TypeAlias = Annotated[Tensor, "float ()"]


class Kept(NamedTuple):
    """For each token the set of ids that it was sampled from, where the sampler truncated: top-k, top-p, min-p.

    Token n of N, which are those of (B, T) row after row or packed, was drawn from ``ids[offsets[n]:offsets[n + 1]]``.
    A token without entries was drawn from the whole vocabulary, or is no response token.

    >>> kept = Kept(torch.tensor([0, 3]), torch.tensor([0, 2, 2]))  # a token of {0, 3}, and one of all
    >>> kept.allowed(4).int()
    tensor([[1, 0, 0, 1],
            [1, 1, 1, 1]], dtype=torch.int32)
    """

    ids: Annotated[Tensor, "int (K,), the sets one after another"]
    offsets: Annotated[Tensor, "int (N+1,), where each begins and ends"]

    @classmethod
    def from_counts(cls, ids: Tensor, counts: Tensor) -> "Kept":
        """The sets of these sizes; ``counts`` is int (B, T) or (N,).

        >>> Kept.from_counts(torch.tensor([0, 3]), torch.tensor([[2, 0]])).offsets
        tensor([0, 2, 2])
        """
        sizes = counts.flatten().long()
        return cls(ids, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))

    @property
    def token_of(self) -> Tensor:
        """(K,): the token that each id belongs to."""
        place = torch.arange(self.ids.shape[0], dtype=self.offsets.dtype, device=self.offsets.device)
        return torch.searchsorted(self.offsets, place, right=True) - 1

    def allowed(self, vocabulary: int, start: int = 0) -> Annotated[Tensor, "bool (N, V)"]:
        """Which tokens of the vocabulary each token could have been; of a shard, of the V tokens from ``start`` on."""
        columns = self.ids.long() - start
        columns = torch.where((columns >= 0) & (columns < vocabulary), columns, vocabulary)  # others: one column more
        nothing = torch.zeros(self.offsets.shape[0] - 1, vocabulary + 1, dtype=torch.bool, device=self.ids.device)
        listed = nothing.index_put((self.token_of, columns), torch.ones_like(self.ids, dtype=torch.bool))
        return listed[:, :vocabulary] | (self.offsets.diff() == 0)[:, None]

    def contains(self, token_ids: Annotated[Tensor, "int64 (N,)"]) -> Annotated[Tensor, "bool (N,)"]:
        """Whether each token is in its own set.

        >>> Kept(torch.tensor([0, 3]), torch.tensor([0, 2, 2])).contains(torch.tensor([1, 1]))
        tensor([False,  True])
        """
        token = self.token_of
        found = torch.zeros_like(token_ids).index_add(0, token, (self.ids == token_ids[token]).to(token_ids.dtype))
        return (found > 0) | (self.offsets.diff() == 0)

    def take(self, tokens: Annotated[Tensor, "int64 (M,)"]) -> "Kept":
        """The sets of these tokens, in their order. How many ids that are is read on the host.

        >>> Kept(torch.tensor([0, 3, 5]), torch.tensor([0, 2, 3])).take(torch.tensor([1, 0])).ids
        tensor([5, 0, 3])
        """
        sizes = self.offsets.diff()[tokens].long()
        ends = sizes.cumsum(0)
        shift = self.offsets[tokens] - (ends - sizes)  # from the place in the new list to that in the old one
        place = torch.arange(int(sizes.sum()), device=self.ids.device) + shift.repeat_interleave(sizes)
        return Kept.from_counts(self.ids[place], sizes)


AllReduce: TypeAlias = Callable[[Tensor], Tensor]
"""Gives every rank the sum (or another reduction) of a tensor over the ranks; it needs no gradient of its own."""


class VocabShard(NamedTuple):
    """The part of the vocabulary that this rank's logits, or its rows of the LM head, are of: tensor parallelism.

    A rank has the columns [start, start + v) of the logits (..., v), or these rows of a head (v, H). The ranks together
    have each of ``size`` columns once, in parts of any sizes, none of them empty. Hidden states, token ids, kept sets
    and masks are whole and the same on all ranks, and so are the results. All ranks make the same calls in one order.

    The value and the first gradient are those of the whole vocabulary, each rank's gradient that of its own part. A
    second derivative is not: it has terms of two shards.

    >>> def two_ranks_alike(x):
    ...     return 2 * x
    >>> VocabShard(start=2, size=4, all_reduce=two_ranks_alike, all_reduce_max=torch.clone).start
    2
    """

    start: int
    """The id of the first column."""
    size: int
    """Of the whole vocabulary."""
    all_reduce: AllReduce
    """Sums a tensor over the ranks; called without a gradient."""
    all_reduce_max: AllReduce
    """Takes the largest over the ranks, element by element; called without a gradient."""
    sum_hidden_gradient: bool = True
    """Sum the gradient of hidden states over the ranks in backward. False where the layer before does: in Megatron's
    sequence parallelism the gradient of its all-gather is a reduce-scatter."""


class SequenceShard(NamedTuple):
    """The part of each sequence that this rank has, where the ranks have one part after the other: context parallelism.

    Rank 0 has the first tokens of every sequence, rank 1 those that follow, and so on, in parts of any lengths, which
    may be empty. All ranks make the same calls in one order.

    >>> alone = SequenceShard(part=0, all_gather=lambda x: x[None])
    >>> alone.all_gather(torch.tensor([1.0])).shape
    torch.Size([1, 1])
    """

    part: int
    """Which one this is, counted from 0."""
    all_gather: Callable[[Tensor], Tensor]
    """Stacks the tensors of all ranks to (R, ...), in the order of the parts; called without a gradient."""

    def all_reduce_rows(self, x: Tensor) -> Tensor:
        """The sum over the parts: what the losses of whole sequences ask for."""
        return self.all_gather(x).sum(0)


class Totals(NamedTuple):
    """How much one optimizer step trains on: the denominators of every mean, whatever the micro-batches are."""

    tokens: Tensor | int
    sequences: Tensor | int
    groups: Tensor | int
    trajectories: Tensor | int | None = None
    """Rollouts, which may be several sequences each; None: not counted."""

    def of_rollouts(self) -> "Totals":
        """The totals where each rollout is one sequence.

        Raises:
            ValueError: the rollouts were not counted.
        """
        if self.trajectories is None:
            raise ValueError(
                "totals.trajectories is None, expected the number of rollouts of the step: give trajectory_ids to "
                "losses.count_totals"
            )
        return self._replace(sequences=self.trajectories)


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
        """total / count, of integers float32; 0 where nothing was counted."""
        total = self.total if self.total.is_floating_point() else self.total.float()
        return total / self.count.clamp(min=1)


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


@dataclass(frozen=True)
class Moments(ABC):
    """Count, means and scatter of K numbers per sample, which merge without cancelling.

    The update is that of Chan, Golub and LeVeque 1983 (The American Statistician 37, 242): sums of squares would lose
    the digits that the variance is made of. What is read of them is the subclass's ``value``.
    """

    count: Tensor
    mean: Tensor
    """(K,)"""
    scatter: Tensor
    """(K, K), Σ (x − mean)(x − mean)ᵀ."""

    def merge(self, other: "Metric") -> Self:
        if type(other) is not type(self):
            raise TypeError(f"a {type(self).__name__} cannot be merged with {other}")
        count, difference = self.count + other.count, other.mean - self.mean
        share = other.count / count.clamp(min=1)
        scatter = self.scatter + other.scatter + torch.outer(difference, difference) * (self.count * share)
        return type(self)(count, self.mean + difference * share, scatter)

    @abstractmethod
    def value(self) -> Tensor: ...


class Correlation(Moments):
    """Of x and y, Pearson's; 0 where either is constant."""

    def value(self) -> Tensor:
        deviations = self.scatter.diagonal().sqrt()
        return _ratio(_ratio(self.scatter[0, 1], deviations[0]), deviations[1])


class ExplainedVariance(Moments):
    """Of R and R − V: 1 − Var(R − V) / Var(R); 0 where R is constant."""

    def value(self) -> Tensor:
        total, left = self.scatter.diagonal()
        return _ratio(total - left, total)


class EffectiveShare(Moments):
    """Of weights w: (Σw)² / (n Σw²), the effective sample size as a share of n; 0 where all are 0."""

    def value(self) -> Tensor:
        square = self.mean[0].square()
        return _ratio(square, square + self.scatter[0, 0] / self.count.clamp(min=1))


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    """x / y, 0 where y is 0."""
    return torch.where(y == 0, 0.0, x / y.masked_fill(y == 0, 1.0))


Metric: TypeAlias = Mean | Max | Moments
Metrics: TypeAlias = dict[str, Metric]


def merge_metrics(*parts: Metrics) -> Metrics:
    """The metrics of the whole from those of its parts.

    >>> half = {"loss": Mean(torch.tensor(1.0), torch.tensor(2))}
    >>> merge_metrics(half, half)["loss"].value()
    tensor(0.5000)
    """
    merged: Metrics = {}
    for part in parts:
        merged |= {name: merged[name].merge(metric) if name in merged else metric for name, metric in part.items()}
    return merged


Function = TypeVar("Function", bound=Callable[..., Tensor])


def token_wise(loss: Function) -> Function:
    """Declare that each token's loss depends on that token's data only, not on its sequence or on the batch.

    Such a loss may be computed on any tokens in any order: ``logprobs.fused_loss`` then never holds whole logits. The
    laws check the claim.

    >>> token_wise(lambda log_probs, response_mask: -log_probs * response_mask).token_wise
    True
    """
    loss.token_wise = True  # type: ignore[attr-defined]
    return loss
