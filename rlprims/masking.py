"""Masked means absent: selection by the mask, and the checks of shapes and dtypes that every primitive makes.

A mask is bool like the tokens, padded ``(B, T)`` or packed ``(N,)``. What stands on masked tokens is never read: not
even NaN changes a value or a gradient.
"""

from typing import get_args

import torch
from torch import Tensor

from rlprims.kernels import are_readable
from rlprims.types import CuSeqlens, PerToken, TokenMask


def upcast(x: Tensor) -> Tensor:
    """float64 stays, everything else becomes float32: the precision of all computations here."""
    return x if x.dtype is torch.float64 else x.float()


def zero_outside(x: PerToken, mask: TokenMask) -> PerToken:
    """``x`` in float32 (or float64 if given), exactly 0 where the mask is False.

    A selection, not a product: NaN and Inf outside the mask reach neither the value nor the gradient.

    >>> zero_outside(torch.tensor([1.0, torch.nan]), torch.tensor([True, False]))
    tensor([1., 0.])
    """
    return torch.where(mask, upcast(x), 0.0)


def masked_mean(x: PerToken, mask: TokenMask) -> Tensor:
    """Mean over the valid tokens of the whole batch; 0 if there are none.

    >>> masked_mean(torch.tensor([[1.0, torch.inf], [3.0, 5.0]]), torch.tensor([[True, False], [True, True]]))
    tensor(3.)
    """
    return zero_outside(x, mask).sum() / mask.sum().clamp(min=1)


def check_tokens(response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, **per_token: Tensor) -> None:
    """Raise ``ValueError`` unless the mask is bool and every named tensor has its shape, padded or packed.

    >>> check_tokens(torch.ones(2, 3, dtype=torch.bool), rewards=torch.zeros(2, 4))
    Traceback (most recent call last):
    ...
    ValueError: rewards has shape (2, 4), response_mask has (2, 3): both must be per token, padded (B, T) or packed (N,)
    """
    if response_mask.dtype is not torch.bool:
        raise ValueError(
            f"response_mask has dtype {response_mask.dtype}, expected torch.bool: pass response_mask.bool()"
        )
    if cu_seqlens is None and response_mask.dim() != 2:
        raise ValueError(
            f"response_mask has shape {tuple(response_mask.shape)}, expected (B, T); packed tokens (N,) need cu_seqlens"
        )
    if cu_seqlens is not None:
        if response_mask.dim() != 1:
            raise ValueError(
                f"response_mask has shape {tuple(response_mask.shape)}, expected (N,) because cu_seqlens is given"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.shape[0] < 1:
            raise ValueError(
                f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}, "
                "expected integers (B+1,): the cumulative lengths, starting with 0"
            )
        if are_readable(cu_seqlens, response_mask):
            check_cu_seqlens(cu_seqlens, response_mask.shape[0])
    for name, tensor in per_token.items():
        if tensor.shape != response_mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, response_mask has {tuple(response_mask.shape)}: "
                "both must be per token, padded (B, T) or packed (N,)"
            )


def check_sequences(response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, **per_sequence: Tensor) -> None:
    """Raise ``ValueError`` unless every named tensor is ``(B,)`` for the B sequences of the mask."""
    sequences = response_mask.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for name, tensor in per_sequence.items():
        if tensor.shape != (sequences,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({sequences},): one entry per sequence")


def check_cu_seqlens(cu_seqlens: CuSeqlens, tokens: int) -> None:
    """Raise ``ValueError`` unless the boundaries start at 0, never decrease, and end at the number of tokens.

    Every primitive does this for tensors on a CPU. On an accelerator the values are not read, because that would wait
    for the device: call it once per batch if the boundaries come from code that you do not trust.

    >>> check_cu_seqlens(torch.tensor([0, 2]), 4)
    Traceback (most recent call last):
    ...
    ValueError: cu_seqlens runs from 0 to 2, expected 0 to 4, the number of packed tokens
    """
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != tokens:
        raise ValueError(
            f"cu_seqlens runs from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}, expected 0 to {tokens}, "
            "the number of packed tokens"
        )
    if (cu_seqlens.diff() < 0).any():
        raise ValueError("cu_seqlens decreases, expected cumulative lengths: 0, then torch.cumsum of the lengths")


def check_logits(logits: Tensor, temperature: float) -> None:
    """Raise ``ValueError`` unless logits are floats (..., V) and the temperature is above 0."""
    if logits.dim() < 1 or not logits.is_floating_point():
        raise ValueError(f"logits has shape {tuple(logits.shape)} and dtype {logits.dtype}, expected floats (..., V)")
    check_temperature(temperature)


def check_temperature(temperature: float) -> None:
    """Raise ``ValueError`` unless it is above 0."""
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}, expected a number above 0: greedy decoding has log-prob 0")


def check_choice(name: str, value: str, choices: object) -> None:
    """Raise ``ValueError`` unless an option is one of the choices of its ``Literal``.

    >>> from typing import Literal
    >>> check_choice("level", "word", Literal["token", "sequence"])
    Traceback (most recent call last):
    ...
    ValueError: level='word', expected 'token' or 'sequence'
    """
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}={value!r}, expected {' or '.join(map(repr, allowed))}")


# TEMPORARY: what the callers that are not rewritten yet still use.
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

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
