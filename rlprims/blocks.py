"""Blocks of whole sequences, padded or packed, that stay in a core's cache, and one tensor of what they gave."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rlprims.masking import empty_like, row_blocks, upcast, zero_outside
from rlprims.types import CuSeqlens, PerSequence, PerToken, TokenMask

_BLOCK_TOKENS = 2**18


def by_blocks(
    function: Callable[..., PerToken],
    per_token: Sequence[Tensor | float | None],
    cu_seqlens: CuSeqlens | None,
    per_sequence: PerSequence | None,
) -> PerToken:
    """``function(*per_token, cu_seqlens, per_sequence)`` for one block of sequences after the other, in one tensor.

    The first of ``per_token`` is a tensor; what is none is handed on as it is.

    >>> by_blocks(lambda x, y, cu, z: x + y + z[:, None], (torch.zeros(2, 2), 1.0), None, torch.tensor([2.0, 3.0]))
    tensor([[3., 3.],
            [4., 4.]])
    """
    first = per_token[0]
    assert isinstance(first, Tensor)
    if first.numel() <= _BLOCK_TOKENS:
        return function(*per_token, cu_seqlens, per_sequence)
    pieces = (
        function(
            *(x[tokens] if isinstance(x, Tensor) else x for x in per_token),
            cu,
            None if per_sequence is None else per_sequence[sequences],
        )
        for tokens, sequences, cu in sequence_blocks(first, cu_seqlens)
    )
    return joined(pieces, first)


def sequence_blocks(x: PerToken, cu_seqlens: CuSeqlens | None) -> Iterator[tuple[slice, slice, CuSeqlens | None]]:
    """For each block of sequences: its slice of the first dimension, its slice of the sequences, its ``cu_seqlens``.

    Packed sequences are put together up to 2^18 tokens; a longer one is a block. An accelerator and a compiler see one.

    >>> list(sequence_blocks(torch.zeros(3), torch.tensor([0, 1, 3])))
    [(slice(0, 3, None), slice(0, 2, None), tensor([0, 1, 3]))]
    """
    if cu_seqlens is None:
        yield from ((rows, rows, None) for rows in row_blocks(x))
    elif x.device.type != "cpu" or torch.compiler.is_compiling() or len(x) <= _BLOCK_TOKENS:
        yield slice(0, len(x)), slice(0, len(cu_seqlens) - 1), cu_seqlens
    else:
        marks = torch.arange(0, len(x), _BLOCK_TOKENS, dtype=cu_seqlens.dtype)
        owners = set((torch.searchsorted(cu_seqlens, marks, right=True) - 1).tolist())
        for first, last in pairwise((*sorted(owners), len(cu_seqlens) - 1)):
            cu = cu_seqlens[first : last + 1]
            yield slice(int(cu[0]), int(cu[-1])), slice(first, last), cu - cu[0]


def selected(x: Tensor, mask: TokenMask) -> Tensor:
    """:func:`zero_outside`, which on a CPU makes no new tensor where the whole block is valid: never write into it.

    >>> selected(torch.tensor([1.0, torch.nan]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    return upcast(x) if all_valid(mask) else zero_outside(x, mask)


def all_valid(mask: TokenMask) -> bool:
    """Whether every token is valid; False where that is not to be read by the host: accelerators and compilers.

    >>> all_valid(torch.ones(1, 3, dtype=torch.bool))
    True
    """
    if mask.device.type != "cpu" or torch.compiler.is_compiling() or not mask.numel():
        return False
    return bool(mask.numpy().all())  # of all such reductions the fastest


def joined(pieces: Iterable[Tensor], like: Tensor) -> Tensor:
    """The pieces one after another, of the shape of ``like`` in all; each is let go before the next one is made.

    >>> joined((torch.full((n,), n) for n in (1, 2)), torch.zeros(3))
    tensor([1, 2, 2])
    """
    pieces = iter(pieces)
    piece = next(pieces)
    if len(piece) == len(like):
        return piece
    if torch.is_grad_enabled() and piece.requires_grad:
        return torch.cat([piece, *pieces])
    whole, done = empty_like(like, piece.dtype), len(piece)
    whole[:done] = piece
    for piece in pieces:
        whole[done : done + len(piece)] = piece
        done += len(piece)
    return whole
