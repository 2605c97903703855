"""Padded and packed sequences: conversion, sums over sequences, values per sequence expanded to tokens, and turns.

Padded tensors are ``(B, T)``. Packed tensors are ``(N,)`` with ``cu_seqlens`` (B+1,): sequence ``i`` is
``[cu_seqlens[i], cu_seqlens[i+1])``. Every function here takes both layouts.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rlprims._sharding import sum_rows
from rlprims.kernels import are_readable
from rlprims.masking import check_choice, check_cu_seqlens, check_tokens, zero_outside
from rlprims.types import AllReduce, CuSeqlens, PerSequence, PerToken, TokenMask, TurnIds

__all__ = [
    "TokenShard", "check_cu_seqlens", "cu_seqlens", "cut_shards", "expand_to_tokens", "join_shards", "last_of_turn",
    "last_token", "lengths_of_tokens", "next_valid", "pack", "sequence_ids", "sequence_lengths", "sequence_sum",
    "shards", "to_tokens", "turn_boundaries", "unpack",
]  # fmt: skip


Cut: TypeAlias = Literal["zigzag", "contiguous"]


def cu_seqlens(lengths: Sequence[int] | Tensor) -> CuSeqlens:
    """The boundaries of packed sequences from their lengths: 0, then the running sum; int64 (B+1,).

    >>> cu_seqlens([2, 0, 1])
    tensor([0, 2, 2, 3])
    """
    counts = torch.as_tensor(lengths)
    if counts.numel() == 0:
        counts = counts.long()
    if counts.dim() != 1 or counts.is_floating_point() or counts.dtype is torch.bool:
        raise ValueError(
            f"lengths has shape {tuple(counts.shape)} and dtype {counts.dtype}, expected integers (B,): the number of "
            "tokens of each sequence without padding; use mask.sum(1)"
        )
    if are_readable(counts) and (counts < 0).any():
        raise ValueError(f"lengths has {int(counts.min())}, expected numbers of at least 0")
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0)])


def sequence_ids(cu_seqlens: CuSeqlens, tokens: int) -> Tensor:
    """The sequence of each packed token: int64 (N,). Empty sequences are legal.

    >>> sequence_ids(torch.tensor([0, 2, 2, 3]), 3)
    tensor([0, 0, 2])
    """
    positions = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(positions, cu_seqlens[1:].contiguous(), right=True)


def sequence_sum(
    x: PerToken, mask: TokenMask, cu_seqlens: CuSeqlens | None = None, *, all_reduce_rows: AllReduce | None = None
) -> PerSequence:
    """Sum of ``x`` over the valid tokens of each sequence: (B,).

    ``all_reduce_rows`` sums a tensor over the ranks if each rank has a part of these sequences; None: the sequences are
    whole. The loss of each rank then depends on these sums. The gradient is that of the losses of all ranks, so
    backward calls ``all_reduce_rows`` too. A second derivative lacks the terms of other ranks.

    >>> x, m = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, True, False])
    >>> sequence_sum(x, m, torch.tensor([0, 1, 3]))
    tensor([1., 2.])
    """
    x = zero_outside(x, mask)
    if cu_seqlens is None:
        sums = x.sum(-1)
    else:
        # index_add adds one token at a time: in float32 the error grows with the length, up to 1 % at a million tokens.
        sums = torch.zeros(cu_seqlens.shape[0] - 1, dtype=torch.float64, device=x.device)
        sums = sums.index_add(0, sequence_ids(cu_seqlens, x.shape[0]), x.double()).to(x.dtype)
    return sums if all_reduce_rows is None else sum_rows(all_reduce_rows, sums)


def sequence_lengths(
    mask: TokenMask, cu_seqlens: CuSeqlens | None = None, *, all_reduce_rows: AllReduce | None = None
) -> Tensor:
    """Number of valid tokens of each sequence: int64 (B,). For ``all_reduce_rows`` see :func:`sequence_sum`.

    >>> sequence_lengths(torch.tensor([[True, False], [True, True]]))
    tensor([1, 2])
    """
    if cu_seqlens is None:
        lengths = mask.sum(-1)
    else:
        lengths = torch.zeros(cu_seqlens.shape[0] - 1, dtype=torch.int64, device=mask.device)
        lengths = lengths.index_add(0, sequence_ids(cu_seqlens, mask.shape[0]), mask.long())
    return lengths if all_reduce_rows is None else sum_rows(all_reduce_rows, lengths)


def expand_to_tokens(x: PerSequence, mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """The value of each sequence, copied to all of its tokens, masked ones too.

    >>> expand_to_tokens(torch.tensor([5.0, 7.0]), torch.tensor([[True, False], [True, True]]))
    tensor([[5., 5.],
            [7., 7.]])
    """
    return x.unsqueeze(-1).expand(mask.shape) if cu_seqlens is None else x[sequence_ids(cu_seqlens, mask.shape[0])]


def to_tokens(x: PerSequence, mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """The value of each sequence, copied to its valid tokens; 0 outside the mask.

    >>> to_tokens(torch.tensor([5.0, 7.0]), torch.tensor([[True, False], [True, True]]))
    tensor([[5., 0.],
            [7., 7.]])
    """
    return zero_outside(expand_to_tokens(x, mask, cu_seqlens), mask)


def lengths_of_tokens(
    mask: TokenMask, cu_seqlens: CuSeqlens | None = None, *, all_reduce_rows: AllReduce | None = None
) -> PerToken:
    """The number of valid tokens of each token's sequence, at least 1: a safe divisor.

    >>> lengths_of_tokens(torch.tensor([[True, True], [False, False]]))
    tensor([[2, 2],
            [1, 1]])
    """
    lengths = sequence_lengths(mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    return expand_to_tokens(lengths.clamp(min=1), mask, cu_seqlens)


def last_token(mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> TokenMask:
    """True on the last valid token of each sequence; an empty sequence has none.

    >>> last_token(torch.tensor([[True, False, True, False], [False, False, False, False]]))
    tensor([[False, False,  True, False],
            [False, False, False, False]])
    """
    so_far = mask.long().cumsum(-1)
    if cu_seqlens is None:
        return mask & (so_far == so_far[..., -1:])
    before = torch.cat([so_far.new_zeros(1), so_far])[cu_seqlens[1:]]
    return mask & (so_far == expand_to_tokens(before, mask, cu_seqlens))


def pack(x: PerToken, cu_seqlens: CuSeqlens) -> PerToken:
    """Padded ``(B, T, ...)`` to packed ``(N, ...)``: the first ``cu_seqlens[i+1] - cu_seqlens[i]`` tokens of each row.

    >>> pack(torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([0, 2, 3]))
    tensor([1, 2, 3])
    """
    lengths = cu_seqlens.diff()
    return x[torch.arange(x.shape[1], device=x.device) < lengths[:, None]]


def unpack(x: PerToken, cu_seqlens: CuSeqlens, width: int, fill: float = 0) -> PerToken:
    """Packed ``(N, ...)`` to padded ``(B, width, ...)``, ``fill`` elsewhere. The inverse of :func:`pack`.

    >>> unpack(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), 3)
    tensor([[1, 2, 0],
            [3, 0, 0]])
    """
    rows = sequence_ids(cu_seqlens, x.shape[0])
    columns = torch.arange(x.shape[0], device=x.device) - cu_seqlens[rows]
    padded = x.new_full((cu_seqlens.shape[0] - 1, width, *x.shape[1:]), fill)
    return padded.index_put((rows, columns), x)


class TokenShard(NamedTuple):
    """The tokens of one rank, of N packed tokens."""

    tokens: Annotated[Tensor, "int64 (n,), positions among the N"]
    cu_seqlens: CuSeqlens
    """(B+1,): where the part of each sequence begins and ends on this rank; a part may be empty."""


def shards(lengths: Annotated[Tensor, "int (B,)"], ranks: int, layout: Cut = "zigzag") -> list[TokenShard]:
    """The tokens of each rank if packed sequences are split over ranks, as in context parallelism.

    "contiguous" splits each sequence into ``ranks`` chunks, and rank r has chunk r. "zigzag" splits it into 2·ranks
    chunks, and rank r has chunks r and 2·ranks − 1 − r: under a causal mask all ranks then have equal work. A chunk has
    ⌈length / chunks⌉ tokens; the last chunks may be shorter or empty.

    >>> [shard.tokens.tolist() for shard in shards(torch.tensor([8, 2]), 2)]
    [[0, 1, 6, 7, 8], [2, 3, 4, 5, 9]]
    >>> [shard.cu_seqlens.tolist() for shard in shards(torch.tensor([8, 2]), 2, "contiguous")]
    [[0, 4, 5], [0, 4, 5]]
    """
    check_choice("layout", layout, Cut)
    if ranks < 1:
        raise ValueError(f"ranks={ranks}, expected at least 1")
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype is torch.bool:
        raise ValueError(
            f"lengths has shape {tuple(lengths.shape)} and dtype {lengths.dtype}, expected integers (B,): the tokens "
            "of each sequence, cu_seqlens.diff()"
        )
    chunks = ranks if layout == "contiguous" else 2 * ranks
    sequence = torch.repeat_interleave(lengths)
    position = torch.arange(sequence.shape[0], device=lengths.device) - (lengths.cumsum(0) - lengths)[sequence]
    chunk_size = (-(-lengths // chunks)).clamp(min=1)
    chunk = position // chunk_size[sequence]
    rank = torch.minimum(chunk, 2 * ranks - 1 - chunk)
    parts = []
    for r in range(ranks):
        index = (rank == r).nonzero()[:, 0]
        counts = torch.zeros_like(lengths).index_add(0, sequence[index], torch.ones_like(index).to(lengths.dtype))
        parts.append(TokenShard(index, torch.cat([counts.new_zeros(1), counts.cumsum(0)])))
    return parts


def cut_shards(x: Tensor, parts: Sequence[TokenShard]) -> list[Tensor]:
    """Packed ``(N, ...)`` to the tokens of each rank.

    >>> cut_shards(torch.tensor([5, 6, 7, 8]), shards(torch.tensor([4]), 2))
    [tensor([5, 8]), tensor([6, 7])]
    """
    return [x[part.tokens] for part in parts]


def join_shards(tensors: Sequence[Tensor], parts: Sequence[TokenShard]) -> Tensor:
    """The tokens of each rank to packed ``(N, ...)``. The inverse of :func:`cut_shards`.

    >>> join_shards([torch.tensor([5, 8]), torch.tensor([6, 7])], shards(torch.tensor([4]), 2))
    tensor([5, 6, 7, 8])
    """
    sizes, expected = [x.shape[0] for x in tensors], [part.tokens.shape[0] for part in parts]
    if sizes != expected:
        raise ValueError(f"tensors have {sizes} tokens, expected {expected}: one tensor for each shard")
    return torch.cat(list(tensors))[torch.cat([part.tokens for part in parts]).argsort()]


def next_valid(mask: TokenMask) -> Tensor:
    """The position of the next valid token after each position, int64; the last position if there is none.

    Packed tokens count as one sequence: for the last token of a sequence the result is a token of the next sequence.
    Use ``scan.next_values``, or exclude :func:`last_token`.

    >>> next_valid(torch.tensor([[True, False, True, True]]))
    tensor([[2, 2, 3, 3]])
    """
    last = max(mask.shape[-1] - 1, 0)
    positions = torch.where(mask, torch.arange(mask.shape[-1], device=mask.device), last)
    this_or_next = positions.flip(-1).cummin(-1).values.flip(-1)
    return torch.cat([this_or_next[..., 1:], this_or_next[..., -1:]], dim=-1)


def last_of_turn(turn_ids: TurnIds, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> TokenMask:
    """True on the last valid token of each turn.

    >>> turns, m = torch.tensor([[0, 0, 9, 1, 1]]), torch.tensor([[True, True, False, True, True]])
    >>> last_of_turn(turns, m).tolist()
    [[False, True, False, False, True]]
    """
    check_tokens(response_mask, cu_seqlens, turn_ids=turn_ids)
    if turn_ids.is_floating_point() or turn_ids.dtype is torch.bool:
        raise ValueError(f"turn_ids has dtype {turn_ids.dtype}, expected integers: the number of each token's turn")
    next_turn = turn_ids.gather(-1, next_valid(response_mask))
    return response_mask & (last_token(response_mask, cu_seqlens) | (next_turn != turn_ids))


def turn_boundaries(turn_ids: TurnIds, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> CuSeqlens:
    """``cu_seqlens`` that make every turn of the flattened tokens a sequence: int64 (N+1,), empty ones at the end.

    There are always N, so that no number is read from a device. A masked token belongs to the turn before or after it.

    >>> turn_boundaries(torch.tensor([[0, 0, 1], [0, 7, 7]]), torch.tensor([[True, True, True], [True, False, False]]))
    tensor([0, 2, 3, 4, 6, 6, 6])
    """
    ends = last_of_turn(turn_ids, response_mask, cu_seqlens).flatten().long()
    turn = ends.cumsum(0) - ends
    return torch.bucketize(torch.arange(turn.shape[0] + 1, device=turn.device), turn)
