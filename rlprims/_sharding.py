"""Sums over ranks inside formulas, for tensors of which each rank has a part: a vocabulary, or sequences.

The reductions are callables that know no gradient. What they give enters a formula with the gradient that the formula
needs, by x − sg(x), which is 0 and has the gradient of x.
"""

import torch
from torch import Tensor

from rlprims.kernels import are_readable
from rlprims.types import AllReduce, VocabShard


def with_value(value: Tensor, x: Tensor) -> Tensor:
    """``value``, with the gradient of x; without one where it is not finite."""
    return value + torch.where(value.isfinite(), x - x.detach(), 0.0)


def max_over(vocab: VocabShard | None, x: Tensor) -> Tensor:
    """The largest over the shards of the vocabulary; inf where any is NaN, which a maximum over ranks may lose."""
    return x if vocab is None else vocab.all_reduce_max(x.detach().masked_fill(x.isnan(), torch.inf))


def sum_over(vocab: VocabShard | None, x: Tensor) -> Tensor:
    """Σ over the shards of the vocabulary, S = Σ_r x_r. Each rank computes the same from S, so ∂S/∂x_r = 1 is all.

    What a rank computes from S must be the same on all ranks. Where each has terms of its own that depend on S, their
    derivatives by S have to be summed too: :func:`sum_of_terms`.
    """
    return x if vocab is None else with_value(vocab.all_reduce(x.detach().clone()), x)


def entries(vocab: VocabShard | None, x: Tensor, token_ids: Tensor) -> Tensor:
    """x (..., V) at the tokens (..., K); the rank that has a token gives it, with its gradient."""
    if vocab is None:
        return x.gather(-1, token_ids)
    columns = token_ids - vocab.start
    is_here = (columns >= 0) & (columns < x.shape[-1])
    own = x.gather(-1, columns.clamp(0, x.shape[-1] - 1))
    return torch.where(is_here, own, vocab.all_reduce(torch.where(is_here, own.detach(), 0.0)))


def normalizer(vocab: VocabShard | None, x: Tensor) -> Tensor:
    """Z = Σ exp x over the vocabulary, (..., 1); of a shard a constant, as :func:`sum_of_terms` expects."""
    total = x.exp().sum(-1, keepdim=True)
    return total if vocab is None else vocab.all_reduce(total.detach().clone())


def sum_of_terms(vocab: VocabShard | None, terms: Tensor, slopes: Tensor, p: Tensor) -> Tensor:
    """Σ_v terms_v over the vocabulary (..., V), with log p = z − log Z and ``slopes`` = ∂terms/∂log p.

    Of a shard, Z is a constant to autograd, so that a rank's terms have no gradient by it. What they lack is
    −(Σ_v slopes_v) ∂log Z/∂z = −(Σ_v slopes_v) p, with the sum over all ranks: it is added, and no rank waits in
    backward.
    """
    if vocab is None:
        return terms.sum(-1)
    mass, slope = p.sum(-1), vocab.all_reduce(slopes.detach().sum(-1))
    return sum_over(vocab, terms.sum(-1)) - slope * (mass - mass.detach())


def columns_of(vocab: VocabShard | None) -> int:
    """The id of the first column."""
    return 0 if vocab is None else vocab.start


def shared(vocab: VocabShard | None, hidden: Tensor) -> Tensor:
    """Hidden states that all shards read: each has a part of their gradient, and backward sums the parts."""
    if vocab is None or not vocab.sum_hidden_gradient or not hidden.requires_grad:
        return hidden
    return _with_gradient_summed(vocab.all_reduce, hidden.view_as(hidden))


def sum_rows(all_reduce: AllReduce, x: Tensor) -> Tensor:
    """S = Σ_r x_r over the ranks, each of which has losses of its own that depend on S: ∂/∂x_r = Σ_q ∂loss_q/∂S.

    The gradient is summed over the ranks in backward, so that all ranks must run it. ``all_reduce`` itself needs none.
    """
    total = all_reduce(x.detach().clone())
    return _with_gradient_summed(all_reduce, with_value(total, x)) if x.requires_grad else total


def _with_gradient_summed(all_reduce: AllReduce, x: Tensor) -> Tensor:
    """x, whose gradient is summed over the ranks. A second derivative is not: it is that of this rank's terms."""
    x.register_hook(lambda gradient: with_value(all_reduce(gradient.detach().clone()), gradient))  # type: ignore[no-untyped-call]
    return x


def check_vocab(vocab: VocabShard | None, columns: int, *token_ids: Tensor) -> int:
    """The size of the whole vocabulary; ``ValueError`` unless a shard of so many columns fits, and ids are in it."""
    if vocab is None:
        return columns
    end = vocab.start + columns
    if vocab.start < 0 or columns < 1 or end > vocab.size:
        raise ValueError(
            f"vocab has start {vocab.start} and size {vocab.size}, and {columns} columns are here: ids [{vocab.start}, "
            f"{end}), expected at least one and all in [0, {vocab.size}); size is that of the whole vocabulary, and "
            "columns that pad it must be cut off"
        )
    for ids in token_ids:
        if are_readable(ids) and ids.numel() and (ids.min() < 0 or ids.max() >= vocab.size):
            raise ValueError(
                f"token_ids are in [{int(ids.min())}, {int(ids.max())}], expected ids of the whole vocabulary: [0, "
                f"{vocab.size - 1}], not of a shard"
            )
    return vocab.size
