"""Sums over ranks inside formulas, for tensors that are split over ranks: by vocabulary, or by sequence.

The reductions are callables without a gradient. The formula adds x − sg(x): 0, with the gradient of x.
"""

import torch
from torch import Tensor

from rlprims.kernels import are_readable
from rlprims.types import AllReduce, VocabShard


def with_value(value: Tensor, x: Tensor) -> Tensor:
    """``value``, with the gradient of x; entries of ``value`` that are not finite have gradient 0."""
    return value + torch.where(value.isfinite(), x - x.detach(), 0.0)


def max_over(vocab: VocabShard | None, x: Tensor) -> Tensor:
    """The maximum over the shards of the vocabulary. NaN becomes inf, because a maximum over ranks may drop NaN."""
    return x if vocab is None else vocab.all_reduce_max(x.detach().masked_fill(x.isnan(), torch.inf))


def sum_over(vocab: VocabShard | None, x: Tensor) -> Tensor:
    """The sum over the shards of the vocabulary, S = Σ_r x_r, with ∂S/∂x_r = 1.

    This gradient is complete if all ranks compute the same loss from S. If each rank has its own terms that depend on
    S, use :func:`sum_rows`, which sums their derivatives with respect to S too.
    """
    return x if vocab is None else with_value(vocab.all_reduce(x.detach().clone()), x)


def entries(vocab: VocabShard | None, x: Tensor, token_ids: Tensor) -> Tensor:
    """x (..., V) at the tokens (..., K). The value comes from the rank that has the token; only it gets a gradient."""
    if vocab is None:
        return x.gather(-1, token_ids)
    columns = token_ids - vocab.start
    is_here = (columns >= 0) & (columns < x.shape[-1])
    own = x.gather(-1, columns.clamp(0, x.shape[-1] - 1))
    return torch.where(is_here, own, vocab.all_reduce(torch.where(is_here, own.detach(), 0.0)))


def normalizer(vocab: VocabShard | None, x: Tensor) -> Tensor:
    """Z = Σ exp x over the vocabulary, (..., 1), if each rank has its own terms of Z: see :func:`sum_rows`."""
    total = x.exp().sum(-1, keepdim=True)
    return total if vocab is None else sum_rows(vocab.all_reduce, total)


def columns_of(vocab: VocabShard | None) -> int:
    """The id of the first column."""
    return 0 if vocab is None else vocab.start


def shared(vocab: VocabShard | None, hidden: Tensor) -> Tensor:
    """Hidden states that all shards use. Each rank computes a part of their gradient, and backward sums the parts."""
    if vocab is None or not vocab.sum_hidden_gradient or not hidden.requires_grad:
        return hidden
    return _with_gradient_summed(vocab.all_reduce, hidden.view_as(hidden))


def sum_rows(all_reduce: AllReduce, x: Tensor) -> Tensor:
    """S = Σ_r x_r over the ranks. Each rank has its own losses, which depend on S: ∂/∂x_r = Σ_q ∂loss_q/∂S.

    Backward sums the gradient over the ranks, so all ranks must run it. ``all_reduce`` itself needs no gradient.
    """
    total = all_reduce(x.detach().clone())
    return _with_gradient_summed(all_reduce, with_value(total, x)) if x.requires_grad else total


def _with_gradient_summed(all_reduce: AllReduce, x: Tensor) -> Tensor:
    """x, whose gradient is summed over the ranks. A second derivative has the terms of this rank only."""
    x.register_hook(lambda gradient: with_value(all_reduce(gradient.detach().clone()), gradient))  # type: ignore[no-untyped-call]
    return x


def check_vocab(vocab: VocabShard | None, columns: int, *token_ids: Tensor) -> int:
    """The size of the whole vocabulary. Raises ``ValueError`` if the shard or a token id lies outside of it."""
    if vocab is None:
        return columns
    end = vocab.start + columns
    if vocab.start < 0 or columns < 1 or end > vocab.size:
        raise ValueError(
            f"vocab has start {vocab.start} and size {vocab.size}, and this rank has {columns} columns: ids "
            f"[{vocab.start}, {end}), expected at least one id and all in [0, {vocab.size}); give the size of the "
            "whole vocabulary, and cut off columns that pad it"
        )
    for ids in token_ids:
        if are_readable(ids) and ids.numel() and (ids.min() < 0 or ids.max() >= vocab.size):
            raise ValueError(
                f"token_ids are in [{int(ids.min())}, {int(ids.max())}], expected ids of the whole vocabulary: [0, "
                f"{vocab.size - 1}], not of a shard"
            )
    return vocab.size
