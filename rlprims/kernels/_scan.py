"""S[t] = a[t] S[t+1] + b[t] from the end of each sequence: see ``rlprims.recurrence``."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def reverse_scan(a: Tensor, b: Tensor, initial: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """S[t] and S[t+1] of packed tokens, like ``b``; one program for each sequence."""
    s, received = torch.empty_like(b), torch.empty_like(b)
    with torch.cuda.device_of(b):
        _scan[(len(cu_seqlens) - 1,)](
            a, b, initial, cu_seqlens, s, received, BLOCK=min(_BLOCK, triton.next_power_of_2(len(b)))
        )
    return s, received


def probe(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Over two edges of a block, one token, none, and a few; with cuts. Beside a walk from the right."""
    dtype = torch.promote_types(dtype, torch.float32)
    lengths = [2 * _BLOCK + 3, 1, 0, 5]
    generator = torch.Generator().manual_seed(0)
    a, b, initial = (torch.rand(n, generator=generator).to(dtype) for n in (sum(lengths), sum(lengths), len(lengths)))
    a[::7] = 0.0
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    s, received, at = [], [], sum(lengths)
    for length, beyond in zip(reversed(lengths), reversed(initial.tolist()), strict=True):
        for t in range(at - 1, at - length - 1, -1):
            received.append(beyond)
            beyond = a[t].item() * beyond + b[t].item()
            s.append(beyond)
        at -= length
    got = reverse_scan(*(x.to(device) for x in (a, b, initial, cu_seqlens)))
    yield from zip(got, (torch.tensor(x[::-1], dtype=torch.float64) for x in (s, received)), strict=True)


@triton.jit
def _then(a_first, b_first, a_second, b_second):
    """The map of two: a cut (a = 0) is a selection, so that nothing beyond it, NaN or not, passes."""
    cut = a_second == 0
    return tl.where(cut, 0.0, a_first * a_second), tl.where(cut, b_second, a_second * b_first + b_second)


@triton.jit
def _scan(a, b, initial, cu_seqlens, s, received, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    start, end = tl.load(cu_seqlens + sequence), tl.load(cu_seqlens + sequence + 1)
    carry = tl.load(initial + sequence)
    if end > start:
        tl.store(received + end - 1, carry)
    for block in range(tl.cdiv(end - start, BLOCK)):
        at = end - (block + 1) * BLOCK + tl.arange(0, BLOCK)
        inside = at >= start
        # Before the sequence's start stands the identity, so that the first entry is the block's carry.
        coefficients = tl.load(a + at, mask=inside, other=1.0)
        addends = tl.load(b + at, mask=inside, other=0.0)
        slopes, offsets = tl.associative_scan((coefficients, addends), 0, _then, reverse=True)
        here = tl.where(slopes == 0, offsets, slopes * carry + offsets)
        tl.store(s + at, here, mask=inside)
        tl.store(received + at - 1, here, mask=at > start)
        carry = tl.sum(tl.where(tl.arange(0, BLOCK) == 0, here, 0.0))
