"""Masked means absent: what every primitive needs to keep that promise, padded or packed.

Padded tensors are ``(B, T)``. Packed tensors are ``(N,)`` with ``cu_seqlens`` (B+1,): sequence ``i`` is
``[cu_seqlens[i], cu_seqlens[i+1])``. Every function here takes both.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.types import CuSeqlens, PerSequence, PerToken, TokenMask, TurnIds

LOG_RATIO_LIMIT = 20.0
"""Every log-ratio is clamped to ± this before ``exp``, so that legal log-probs give finite values and gradients."""


_BLOCK_ELEMENTS = 2**18
"""Elements of one block: its temporaries stay in a core's cache, in float32 1 MiB each."""

_FROM_NUMPY = range(2**17 + 1, 2**26 + 1)
"""Elements for which numpy's memory is cheaper than torch's: fewer are sooner had there; for more, whole huge pages may
have to be found, and a virtual machine asks its host for them."""

_NUMPYS: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.bool: np.bool_,
}

_FEW_ELEMENTS = 2**12
"""Below, one call of torch takes less time than what would be saved by several."""


def check_tokens(response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, **per_token: Tensor) -> None:
    """Raise ``ValueError`` unless the mask is bool and every named tensor has its shape, padded or packed.

    >>> check_tokens(torch.ones(2, 3, dtype=torch.bool), rewards=torch.zeros(2, 4))
    Traceback (most recent call last):
    ...
    ValueError: rewards has shape (2, 4), response_mask has (2, 3): both must be per token, padded (B, T) or packed (N,)
    """
    if response_mask.dtype is not torch.bool:
        raise ValueError(f"response_mask has dtype {response_mask.dtype}, needs torch.bool: pass response_mask.bool()")
    if cu_seqlens is None and response_mask.dim() != 2:
        raise ValueError(
            f"response_mask has shape {tuple(response_mask.shape)}, needs (B, T); packed tokens (N,) need cu_seqlens"
        )
    if cu_seqlens is not None:
        if response_mask.dim() != 1:
            raise ValueError(
                f"response_mask has shape {tuple(response_mask.shape)}, needs (N,) because cu_seqlens is given"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 1:
            raise ValueError(
                f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}, "
                "needs integers (B+1,): the cumulative lengths, beginning with 0"
            )
    for name, tensor in per_token.items():
        if tensor.shape != response_mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, response_mask has {tuple(response_mask.shape)}: "
                "both must be per token, padded (B, T) or packed (N,)"
            )


def check_sequences(response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, **per_sequence: Tensor) -> None:
    """Raise ``ValueError`` unless every named tensor is ``(B,)`` for the B sequences of the mask."""
    sequences = len(response_mask) if cu_seqlens is None else len(cu_seqlens) - 1
    for name, tensor in per_sequence.items():
        if tensor.shape != (sequences,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, needs ({sequences},): one entry per sequence")


def upcast(x: Tensor) -> Tensor:
    """float64 stays, everything else is computed in float32."""
    return x if x.dtype is torch.float64 else x.float()


def zero_outside(x: PerToken, mask: TokenMask) -> PerToken:
    """``x`` in computing precision, exactly 0 where the mask is False, whatever stood there.

    A selection, not a product: NaN and Inf outside the mask reach neither the value nor the gradient.

    >>> zero_outside(torch.tensor([1.0, torch.nan]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    return torch.where(mask, upcast(x), 0.0)


def _selected_plainly(x: Tensor, mask: Tensor) -> bool:
    few = x.numel() < _FEW_ELEMENTS
    return few or x.device.type != "cpu" or x.shape != mask.shape or torch.compiler.is_compiling()


def _chosen(x: Tensor, mask: Tensor) -> Tensor:
    """``torch.where(mask, x, 0.0)`` as a product of integers, 0 or 1 times the bits: three to eight times as fast."""
    bits, ones = x.view(torch.int64 if x.dtype is torch.float64 else torch.int32), mask.view(torch.int8)
    chosen = empty_like(bits, bits.dtype)
    if chosen.numel() <= _BLOCK_ELEMENTS:
        return chosen.copy_(ones).mul_(bits).view(x.dtype)
    for rows in row_blocks(chosen):
        chosen[rows].copy_(ones[rows]).mul_(bits[rows])
    return chosen.view(x.dtype)


def write_zero_outside(mask: TokenMask, *pairs: tuple[PerToken, PerToken]) -> None:
    """Of each pair, x and out: ``out`` becomes :func:`zero_outside` of x, without a gradient; x may be out itself.

    >>> out = torch.ones(2)
    >>> write_zero_outside(torch.tensor([True, False]), (torch.tensor([3.0, torch.nan]), out))
    >>> out
    tensor([3., 0.])
    """
    keep = None
    for x, out in pairs:
        if x.dtype is not out.dtype or x.dtype is torch.float64 or _selected_plainly(x, mask):
            out.copy_(torch.where(mask, x, 0.0))
        else:
            keep = empty_like(x, torch.int32).copy_(mask.view(torch.int8)) if keep is None else keep
            torch.mul(x.view(torch.int32), keep, out=out.view(torch.int32))


class _ZeroOutside(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, mask: Tensor) -> Tensor:
        return _chosen(x, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        sign_zero_outside(ctx, inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return zero_outside(grad, *ctx.saved_tensors), None


def sign_zero_outside(ctx: Any, mask: TokenMask) -> None:
    """Note in an autograd node that what it made is 0 outside the mask and takes no gradient there.

    Then the next selection by the same mask, such as an aggregation's, is none: neither its pass over the values nor
    its gradient, as large as the batch, is made. Any operation in between, in place or not, is another node.
    """
    ctx.zero_outside = (mask, mask._version)


def _made_zero_outside(x: Tensor, mask: Tensor) -> bool:
    signed, version = getattr(x.grad_fn, "zero_outside", (None, 0))
    return signed is mask and version == mask._version


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where True, else 0; from bytes, for torch takes eight times as long to convert bools.

    >>> as_numbers(torch.tensor([True, False]), torch.float32)
    tensor([1., 0.])
    """
    return as_bytes(mask).to(dtype)


def as_bytes(mask: Tensor) -> Tensor:
    """The mask's own bytes, 1 or 0, for torch takes eight times as long to convert bools; a compiler does not."""
    return mask if torch.compiler.is_compiling() else mask.view(torch.int8)


def count(mask: Tensor) -> Tensor:
    """How many are True: ``mask.count_nonzero()``; on a CPU by numpy, five times as fast.

    >>> count(torch.tensor([True, False]))
    tensor(1)
    """
    few = mask.numel() < _FEW_ELEMENTS or type(mask) is not Tensor or mask.device.type != "cpu"
    if few or torch.compiler.is_compiling():
        return mask.count_nonzero()
    return torch.tensor(int(np.count_nonzero(mask.numpy())), device=mask.device)


def positive(x: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where x > 0, else 0; numbers, for a comparison to bool takes torch five times as long.

    >>> positive(torch.tensor([2.0, 0.0, -3.0]), torch.float32)
    tensor([1., 0., 0.])
    """
    return torch.gt(x.detach(), 0, out=empty_like(x, dtype))


def negative(x: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where x < 0, else 0.

    >>> negative(torch.tensor([2.0, 0.0, -3.0]), torch.float32)
    tensor([0., 0., 1.])
    """
    return torch.lt(x.detach(), 0, out=empty_like(x, dtype))


def empty_like(x: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None) -> Tensor:
    """``torch.empty_like`` of another dtype and shape; what is large, on a CPU, from numpy, whose memory is cheaper.

    torch aligns what it allocates, and what malloc then gets back need not fit the next one: from block to block all
    pages may come from the system anew. Above 4 MiB numpy also asks for huge pages, which clear five times as fast.

    >>> empty_like(torch.zeros(2, 3), torch.bool).shape
    torch.Size([2, 3])
    """
    plain = type(x) is Tensor and x.device.type == "cpu" and dtype in _NUMPYS and not torch.compiler.is_compiling()
    if shape is None:
        if not plain or x.numel() not in _FROM_NUMPY or not x.is_contiguous():
            return torch.empty_like(x, dtype=dtype)
        shape = x.shape
    elif not plain or math.prod(shape) not in _FROM_NUMPY:
        return x.new_empty(shape, dtype=dtype)
    return torch.from_numpy(np.empty(shape, _NUMPYS[dtype]))


def row_blocks(x: Tensor) -> Iterator[slice]:
    """Slices that cover the rows of ``x``, or its packed tokens, in order: what they cut out stays in a core's cache.

    A temporary of the size of a large batch is given back to the system when it is freed, and its pages are cleared
    again for the next: fifteen times the price of its bytes. An accelerator and a compiler see one block.

    >>> list(row_blocks(torch.zeros(3, 2**17)))
    [slice(0, 2, None), slice(2, 4, None)]
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return iter((slice(None),))
    rows = max(1, _BLOCK_ELEMENTS // max(1, x[:1].numel()))
    return (slice(start, start + rows) for start in range(0, max(1, len(x)), rows))


def sequence_ids(cu_seqlens: CuSeqlens, tokens: int) -> Tensor:
    """Which sequence each packed token belongs to: int64 (N,). Empty sequences are legal.

    >>> sequence_ids(torch.tensor([0, 2, 2, 3]), 3)
    tensor([0, 0, 2])
    """
    positions = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)


def sequence_sum(x: PerToken, mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerSequence:
    """Sum of ``x`` over the valid tokens of each sequence: (B,).

    >>> x, m = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, True, False])
    >>> sequence_sum(x, m, torch.tensor([0, 1, 3]))
    tensor([1., 2.])
    """
    if cu_seqlens is None:
        if x.numel() <= _BLOCK_ELEMENTS or (x.requires_grad and torch.is_grad_enabled()):
            return zero_outside(x, mask).sum(-1)
        return torch.cat([zero_outside(x[rows], mask[rows]).sum(-1) for rows in row_blocks(mask)])
    kept = zero_outside(x, mask)
    sums = kept.new_zeros(len(cu_seqlens) - 1)
    return sums.index_add(0, sequence_ids(cu_seqlens, len(kept)), kept)


def sequence_lengths(mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> Tensor:
    """Number of valid tokens of each sequence: int64 (B,).

    >>> sequence_lengths(torch.tensor([[True, False], [True, True]]))
    tensor([1, 2])
    """
    if cu_seqlens is None:
        counts = [mask[rows].sum(-1) for rows in row_blocks(mask)]  # each sum makes an int64 of what it sums
        return counts[0] if len(counts) == 1 else torch.cat(counts)
    none = torch.zeros(len(cu_seqlens) - 1, dtype=torch.int64, device=mask.device)
    return none.index_add(0, sequence_ids(cu_seqlens, len(mask)), mask.long())


def to_tokens(x: PerSequence, mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """Each sequence's number on each of its valid tokens, 0 outside the mask.

    >>> to_tokens(torch.tensor([5.0, 7.0]), torch.tensor([[True, False], [True, True]]))
    tensor([[5., 0.],
            [7., 7.]])
    """
    return zero_outside(spread(x, mask, cu_seqlens), mask)


def spread(x: PerSequence, mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """Each sequence's number on each of its tokens, masked ones too: for what is masked afterwards.

    >>> spread(torch.tensor([5.0, 7.0]), torch.tensor([[True, False], [True, True]]))
    tensor([[5., 5.],
            [7., 7.]])
    """
    return x.unsqueeze(-1).expand(mask.shape) if cu_seqlens is None else x[sequence_ids(cu_seqlens, len(mask))]


def last_token(mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> TokenMask:
    """True on the last valid token of each sequence; an empty sequence has none.

    >>> last_token(torch.tensor([[True, False, True, False], [False, False, False, False]]))
    tensor([[False, False,  True, False],
            [False, False, False, False]])
    """
    if cu_seqlens is None:
        so_far = mask.cumsum(-1)
        return mask & (so_far == mask.sum(-1, keepdim=True))
    so_far = torch.cat([torch.zeros(1, dtype=torch.int64, device=mask.device), mask.cumsum(0)])
    at_end = so_far[cu_seqlens[1:]][sequence_ids(cu_seqlens, len(mask))]
    return mask & (so_far[1:] == at_end)


def masked_mean(x: PerToken, mask: TokenMask) -> Tensor:
    """Mean over the valid tokens of the whole batch; 0 if there are none.

    >>> masked_mean(torch.tensor([[1.0, torch.inf], [3.0, 5.0]]), torch.tensor([[True, False], [True, True]]))
    tensor(3.)
    """
    return zero_outside(x, mask).sum() / mask.count_nonzero().clamp(min=1)


def pack(x: PerToken, cu_seqlens: CuSeqlens) -> PerToken:
    """Padded ``(B, T)`` to packed ``(N,)``: the first ``cu_seqlens[i+1] - cu_seqlens[i]`` tokens of each row.

    >>> pack(torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([0, 2, 3]))
    tensor([1, 2, 3])
    """
    lengths = cu_seqlens.diff()
    return x[torch.arange(x.shape[1], device=x.device) < lengths[:, None]]


def unpack(x: PerToken, cu_seqlens: CuSeqlens, width: int, fill: float = 0) -> PerToken:
    """Packed ``(N,)`` to padded ``(B, width)``, ``fill`` after each sequence's end. The inverse of :func:`pack`.

    >>> unpack(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), 3)
    tensor([[1, 2, 0],
            [3, 0, 0]])
    """
    rows = sequence_ids(cu_seqlens, len(x))
    columns = torch.arange(len(x), device=x.device) - cu_seqlens[rows]
    padded = torch.full((len(cu_seqlens) - 1, width), fill, dtype=x.dtype, device=x.device)
    return padded.index_put((rows, columns), x)


def log_ratio(log_probs: PerToken, old_log_probs: PerToken, mask: TokenMask) -> PerToken:
    """log_probs − old_log_probs, clamped to ±20; 0 outside the mask; gradient to the first only.

    >>> log_ratio(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -900.0]), torch.tensor([True, True]))
    tensor([ 0.5000, 20.0000])
    """
    difference = zero_outside(upcast(log_probs) - upcast(old_log_probs).detach(), mask)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def summed_log_ratio(
    log_probs: PerToken, old_log_probs: PerToken, mask: TokenMask, cu_seqlens: CuSeqlens | None
) -> PerToken:
    """Σ_t (log_probs − old_log_probs) over each sequence, on each of its valid tokens; not clamped."""
    difference = upcast(log_probs) - upcast(old_log_probs).detach()
    return to_tokens(sequence_sum(difference, mask, cu_seqlens), mask, cu_seqlens)


def lengths_of_tokens(mask: TokenMask, cu_seqlens: CuSeqlens | None) -> PerToken:
    """The number of valid tokens of each token's sequence; at least 1, so that it may divide."""
    lengths = sequence_lengths(mask, cu_seqlens).clamp(min=1)
    return to_tokens(lengths, mask, cu_seqlens).clamp(min=1)


def sequence_log_ratio(
    log_probs: PerToken, old_log_probs: PerToken, mask: TokenMask, cu_seqlens: CuSeqlens | None, *, mean: bool
) -> PerToken:
    """Sum or mean of the log-ratios of each sequence, clamped to ±20, on each of its tokens, masked ones too.

    The clamp is on the sequence's number and not on the tokens', so that the ratio is that of the response.
    """
    total = sequence_sum(upcast(log_probs) - upcast(old_log_probs).detach(), mask, cu_seqlens)
    if mean:
        total = total / sequence_lengths(mask, cu_seqlens).clamp(min=1)
    return spread(total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), mask, cu_seqlens)


def last_of_turn(turn_ids: TurnIds, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> TokenMask:
    """True on valid tokens that end the sequence or are followed by a valid token of another turn.

    >>> turns, m = torch.tensor([[0, 0, 9, 1, 1]]), torch.tensor([[True, True, False, True, True]])
    >>> last_of_turn(turns, m).tolist()
    [[False, True, False, False, True]]
    """
    check_tokens(response_mask, cu_seqlens, turn_ids=turn_ids)
    if turn_ids.is_floating_point() or turn_ids.dtype is torch.bool:
        raise ValueError(f"turn_ids has dtype {turn_ids.dtype}, needs integers: the number of each token's turn")
    width = response_mask.shape[-1]
    # The next valid position, by a minimum from the right; the last of all stands for none.
    positions = torch.where(response_mask, torch.arange(width, device=response_mask.device), max(width - 1, 0))
    from_here = positions.flip(-1).cummin(-1).values.flip(-1)
    following = torch.cat([from_here[..., 1:], from_here[..., -1:]], dim=-1)
    ends = last_token(response_mask, cu_seqlens)
    return response_mask & (ends | (turn_ids.gather(-1, following) != turn_ids))


def turn_boundaries(turn_ids: TurnIds, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> CuSeqlens:
    """``cu_seqlens`` under which every turn of the flattened tokens is a sequence: int64 (N+1,), empty ones at the end.

    With them whatever is said of a sequence can be said of a turn; how many there are is not read by the host. Masked
    tokens are in whichever turn is near.

    >>> turn_boundaries(torch.tensor([[0, 0, 1], [0, 7, 7]]), torch.tensor([[True, True, True], [True, False, False]]))
    tensor([0, 2, 3, 4, 6, 6, 6])
    """
    ends = last_of_turn(turn_ids, response_mask, cu_seqlens).flatten().long()
    turn = ends.cumsum(0) - ends
    return torch.searchsorted(turn, torch.arange(len(turn) + 1, device=turn.device))
