"""The reverse scan in Triton: one program for each row, block by block from its end."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def reverse_scan(a: Tensor, b: Tensor) -> Tensor:
    """S[t] = a[t] S[t+1] + b[t] over the last dimension, with S = 0 beyond the end; without gradients."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    dtype = torch.promote_types(a.dtype, b.dtype)
    a, b = (x.to(dtype).expand(shape).contiguous() for x in (a, b))
    s = torch.empty_like(b)
    if s.numel() > 0:
        rows, length = shape[:-1].numel(), shape[-1]
        with torch.cuda.device_of(b):
            _scan[(rows,)](a, b, s, length, BLOCK=min(_BLOCK, triton.next_power_of_2(length)))
    return s


@triton.jit
def _compose(a_first, b_first, a_second, b_second):
    """The composition of two maps. Where a_second is 0 it is a selection: even NaN of the first map has no effect."""
    is_zero = a_second == 0
    return tl.where(is_zero, 0.0, a_first * a_second), tl.where(is_zero, b_second, a_second * b_first + b_second)


@triton.jit
def _scan(a, b, s, length, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * length
    carry = tl.zeros([], s.dtype.element_ty)
    for block in range(tl.cdiv(length, BLOCK)):
        position = length - (block + 1) * BLOCK + tl.arange(0, BLOCK)
        inside = position >= 0
        # Positions before the row's start get the identity map, so that the block's first entry is its carry.
        coefficient = tl.load(a + start + position, mask=inside, other=1.0)
        addend = tl.load(b + start + position, mask=inside, other=0.0)
        slope, offset = tl.associative_scan((coefficient, addend), 0, _compose, reverse=True)
        block_s = tl.where(slope == 0, offset, slope * carry + offset)
        tl.store(s + start + position, block_s, mask=inside)
        carry = tl.sum(tl.where(tl.arange(0, BLOCK) == 0, block_s, 0.0))
