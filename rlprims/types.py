"""Names for tensor shapes in signatures, and the value types that several packages share.

B sequences, T response positions, N packed tokens, P pairs, V vocabulary. A per-token tensor is padded ``(B, T)``, or
packed ``(N,)`` with ``cu_seqlens`` (B+1,) saying where each sequence begins and ends, as in variable-length attention.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Self, TypeAlias, TypeVar

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


class SamplingSupport(NamedTuple):
    """The set of ids that each token was sampled from, if the sampler leaves some out: top-k, top-p, min-p, bad words.

    The N tokens are packed, or those of (B, T) row after row. Token n was drawn from ``ids[offsets[n]:offsets[n +
    1]]``; or, if these are negative, from all but the ids ~v of them. A token with an empty set was drawn from the
    whole vocabulary, or is not a response token.

    >>> kept = SamplingSupport(torch.tensor([0, 3]), torch.tensor([0, 2, 2]))  # the sets {0, 3}, and the vocabulary
    >>> kept.allowed(4).int()
    tensor([[1, 0, 0, 1],
            [1, 1, 1, 1]], dtype=torch.int32)
    """

    ids: Annotated[Tensor, "int (K,), the sets one after another; of a set all or none are negative"]
    offsets: Annotated[Tensor, "int (N+1,), where each set begins and ends"]

    @classmethod
    def from_counts(cls, ids: Tensor, counts: Tensor) -> "SamplingSupport":
        """The sets of these sizes; ``counts`` is int (B, T) or (N,).

        >>> SamplingSupport.from_counts(torch.tensor([0, 3]), torch.tensor([[2, 0]])).offsets
        tensor([0, 2, 2])
        """
        sizes = counts.flatten().long()
        return cls(ids, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))

    @classmethod
    def from_allowed(cls, allowed: Annotated[Tensor, "bool (N, V)"]) -> "SamplingSupport":
        """The sets of these masks, each as what it has or as what it leaves out, whichever is less.

        >>> SamplingSupport.from_allowed(torch.tensor([[True, False, False], [True, True, False]])).ids
        tensor([ 0, -3])
        """
        leaves_out = allowed.sum(-1) * 2 > allowed.shape[-1]
        written = allowed ^ leaves_out[:, None]
        token, ids = written.nonzero().unbind(-1)
        return cls.from_counts(torch.where(leaves_out[token], ~ids, ids), written.sum(-1))

    @property
    def token_of(self) -> Tensor:
        """(K,): the token that each id belongs to."""
        place = torch.arange(self.ids.shape[0], dtype=self.offsets.dtype, device=self.offsets.device)
        return torch.searchsorted(self.offsets, place, right=True) - 1

    def allowed(self, vocabulary: int, start: int = 0) -> Annotated[Tensor, "bool (N, V)"]:
        """Which ids each token could have been: of the whole vocabulary, or of the V ids of a shard from ``start``."""
        columns = self._names.long() - start
        is_inside = (columns >= 0) & (columns < vocabulary)
        columns = torch.where(is_inside, columns, vocabulary)  # the ids of other shards go to an extra last column
        none = torch.zeros(self.offsets.shape[0] - 1, vocabulary + 1, dtype=torch.bool, device=self.ids.device)
        token = self.token_of
        in_set = none.index_put((token, columns), torch.ones_like(self.ids, dtype=torch.bool))
        return in_set[:, :vocabulary] ^ self._leaves_out(token)[:, None]

    def contains(self, token_ids: Annotated[Tensor, "int64 (N,)"]) -> Annotated[Tensor, "bool (N,)"]:
        """Whether each token is in its own set.

        >>> SamplingSupport(torch.tensor([0, 3]), torch.tensor([0, 2, 2])).contains(torch.tensor([1, 1]))
        tensor([False,  True])
        """
        token = self.token_of
        found = torch.zeros_like(token_ids).index_add(0, token, (self._names == token_ids[token]).to(token_ids.dtype))
        return (found > 0) ^ self._leaves_out(token)

    @property
    def _names(self) -> Tensor:
        """(K,): the ids, also those that are left out."""
        return torch.where(self.ids < 0, ~self.ids, self.ids)

    def _leaves_out(self, token: Tensor) -> Tensor:
        """(N,): whether the set of a token has the ids that are left out: none, or negative ones."""
        return (self.offsets.diff() == 0).index_put((token,), self.ids < 0)

    def take(self, tokens: Annotated[Tensor, "int64 (M,)"]) -> "SamplingSupport":
        """The sets of these tokens, in their order. The number of ids is read from the device.

        >>> SamplingSupport(torch.tensor([0, 3, 5]), torch.tensor([0, 2, 3])).take(torch.tensor([1, 0])).ids
        tensor([5, 0, 3])
        """
        sizes = self.offsets.diff()[tokens].long()
        ends = sizes.cumsum(0)
        shift = self.offsets[tokens] - (ends - sizes)  # position in the old list − position in the new list
        place = torch.arange(int(sizes.sum()), device=self.ids.device) + shift.repeat_interleave(sizes)
        return SamplingSupport.from_counts(self.ids[place], sizes)


AllReduce: TypeAlias = Callable[[Tensor], Tensor]
"""Returns the sum (or another reduction) of a tensor over the ranks, on every rank; it needs no gradient."""


class VocabShard(NamedTuple):
    """The part of the vocabulary on this rank, for tensor parallelism.

    A rank has the columns [start, start + v) of the logits (..., v), or these rows of an LM head (v, H). Each of the
    ``size`` columns is on exactly one rank, and no rank has an empty part; the parts may differ in size. Hidden states,
    token ids, kept sets, masks and results are whole and the same on all ranks. All ranks must make the same calls in
    the same order.

    Values and first gradients equal those of the whole vocabulary. Second derivatives lack terms that mix two shards.

    >>> def sum_of_two_equal_ranks(x):
    ...     return 2 * x
    >>> VocabShard(start=2, size=4, all_reduce=sum_of_two_equal_ranks, all_reduce_max=torch.clone).start
    2
    """

    start: int
    """The id of the first column."""
    size: int
    """The size of the whole vocabulary."""
    all_reduce: AllReduce
    """Sums a tensor over the ranks; called without a gradient."""
    all_reduce_max: AllReduce
    """Takes the maximum over the ranks, element by element; called without a gradient."""
    sum_hidden_gradient: bool = True
    """Sum the gradient of hidden states over the ranks in backward. Use False if the layer before sums it: in
    Megatron's sequence parallelism the gradient of the all-gather is a reduce-scatter."""


class SequenceShard(NamedTuple):
    """The part of each sequence on this rank, for context parallelism with contiguous parts.

    Rank 0 has the first tokens of every sequence, rank 1 the next ones, and so on. Parts may have any length and may be
    empty. All ranks must make the same calls in the same order.

    >>> single_rank = SequenceShard(part=0, all_gather=lambda x: x[None])
    >>> single_rank.all_gather(torch.tensor([1.0])).shape
    torch.Size([1, 1])
    """

    part: int
    """The number of this rank's part, from 0."""
    all_gather: Callable[[Tensor], Tensor]
    """Stacks the tensors of all ranks to (R, ...), in the order of the parts; called without a gradient."""

    def all_reduce_rows(self, x: Tensor) -> Tensor:
        """The sum over the parts, for the argument ``all_reduce_rows`` of losses of whole sequences."""
        return self.all_gather(x).sum(0)


class Totals(NamedTuple):
    """Counts over one whole optimizer step: the denominators of every mean, for any split into micro-batches."""

    tokens: Tensor | int
    sequences: Tensor | int
    groups: Tensor | int
    trajectories: Tensor | int | None = None
    """The number of rollouts, each of which may be several sequences; None: not counted."""

    def over_ranks(self, group: Any = None) -> "Totals":
        """The sum over the ranks of a process group, each with rows of its own; None: all ranks."""
        counts = {name: torch.as_tensor(n).clone() for name, n in self._asdict().items() if n is not None}
        for count in counts.values():
            torch.distributed.all_reduce(count, group=group)
        return Totals(**counts)

    def of_rollouts(self) -> "Totals":
        """The totals if each rollout counts as one sequence; ``ValueError`` if the rollouts were not counted."""
        if self.trajectories is None:
            raise ValueError("totals.trajectories is None, expected int: give trajectory_ids to losses.count_totals")
        return self._replace(sequences=self.trajectories)


@dataclass(frozen=True)
class Mean:
    """A mean as total and count. Parts merge exactly: their totals are added, and their counts."""

    total: Tensor
    count: Tensor

    def merge(self, other: "Metric") -> "Mean":
        if not isinstance(other, Mean):
            raise TypeError(f"expected a Mean to merge with a Mean, got {other}")
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> Tensor:
        """total / count; float32 if the total is an integer; 0 if the count is 0."""
        total = self.total if self.total.is_floating_point() else self.total.float()
        return total / self.count.clamp(min=1)


@dataclass(frozen=True)
class Max:
    """A maximum over parts."""

    largest: Tensor

    def merge(self, other: "Metric") -> "Max":
        if not isinstance(other, Max):
            raise TypeError(f"expected a Max to merge with a Max, got {other}")
        return Max(self.largest.maximum(other.largest))

    def value(self) -> Tensor:
        return self.largest


@dataclass(frozen=True)
class Moments(ABC):
    """Count, means and scatter matrix of K numbers per sample. Parts merge without cancellation.

    The update is that of Chan, Golub and LeVeque 1983 (The American Statistician 37, 242). Sums of squares would lose
    the digits of a small variance. A subclass computes its ``value`` from these moments.
    """

    count: Tensor
    mean: Tensor
    """(K,)"""
    scatter: Tensor
    """(K, K), Σ (x − mean)(x − mean)ᵀ."""

    def merge(self, other: "Metric") -> Self:
        if type(other) is not type(self):
            raise TypeError(f"expected {type(self).__name__} to merge with {type(self).__name__}, got {other}")
        count, delta = self.count + other.count, other.mean - self.mean
        share = other.count / count.clamp(min=1)
        scatter = self.scatter + other.scatter + torch.outer(delta, delta) * (self.count * share)
        return type(self)(count, self.mean + delta * share, scatter)

    @abstractmethod
    def value(self) -> Tensor: ...


class Correlation(Moments):
    """Pearson's correlation of x and y; 0 if x or y is constant."""

    def value(self) -> Tensor:
        deviations = self.scatter.diagonal().sqrt()
        return _ratio(_ratio(self.scatter[0, 1], deviations[0]), deviations[1])


class ExplainedVariance(Moments):
    """1 − Var(R − V) / Var(R), from the moments of R and R − V; 0 if R is constant."""

    def value(self) -> Tensor:
        total, residual = self.scatter.diagonal()
        return _ratio(total - residual, total)


class EffectiveShare(Moments):
    """(Σw)² / (n Σw²) of weights w: the effective sample size as a share of n; 0 if all weights are 0."""

    def value(self) -> Tensor:
        square = self.mean[0].square()
        return _ratio(square, square + self.scatter[0, 0] / self.count.clamp(min=1))


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    """x / y, 0 where y is 0."""
    return torch.where(y == 0, 0.0, x / y.masked_fill(y == 0, 1.0))


Metric: TypeAlias = Mean | Max | Moments
Metrics: TypeAlias = dict[str, Metric]


def merge_metrics(*parts: Metrics) -> Metrics:
    """The metrics of a whole batch from the metrics of its parts.

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

    Such a loss may be computed on any tokens in any order, as ``logprobs.fused_loss`` does. The laws test this.

    >>> token_wise(lambda log_probs, response_mask: -log_probs * response_mask).token_wise
    True
    """
    loss.token_wise = True  # type: ignore[attr-defined]
    return loss
