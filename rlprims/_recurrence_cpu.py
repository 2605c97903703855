"""The linear recurrence on a CPU, without gradients: ``rlprims.recurrence`` says what is solved, and is the oracle.

Both ways write into memory that is there, and expect what fits a core's cache: blocks of ``rlprims.blocks``.
"""

import torch
from torch import Tensor

_STRIDE = 4
"""Positions that are composed into one. Fewer make more passes, more read memory in wider steps; 4 was fastest."""


def solve(a: Tensor, b: Tensor, s: Tensor, cuts: bool = False) -> None:
    """Fill s so that s[t] = a[t] s[t+1] + b[t]; s is one longer than a and b, and its last entry is given.

    Four neighbours are composed into one map; the recurrence of those, a quarter as long, is solved the same way. With
    ``cuts`` nothing passes a coefficient 0, neither NaN nor Inf; where all is finite, the bits are the same without.
    """
    length = b.shape[-1]
    end = length // _STRIDE * _STRIDE
    for t in range(length - 1, end - 1, -1):  # fewer than four
        _map(a[..., t], s[..., t + 1], b[..., t], cuts, s[..., t])
    if not end:
        return
    maps = [(a[..., i:end:_STRIDE], b[..., i:end:_STRIDE]) for i in range(_STRIDE)]
    coefficient, addend = maps[-1]
    for a_i, b_i in reversed(maps[:-1]):
        addend = _map(a_i, addend, b_i, cuts)
        coefficient = torch.where(a_i == 0, a_i, a_i * coefficient) if cuts else a_i * coefficient
    firsts = s.new_empty((*s.shape[:-1], end // _STRIDE + 1))
    firsts[..., -1] = s[..., end]
    solve(coefficient, addend, firsts, cuts)
    s[..., 0:end:_STRIDE] = firsts[..., :-1]
    after = firsts[..., 1:]
    for i in range(_STRIDE - 1, 0, -1):
        a_i, b_i = maps[i]
        after = _map(a_i, after, b_i, cuts, s[..., i:end:_STRIDE])


def _map(a: Tensor, x: Tensor, b: Tensor, cuts: bool, out: Tensor | None = None) -> Tensor:
    y = torch.addcmul(b, a, x, out=out)
    return torch.where(a == 0, b, y, out=out) if cuts else y


def solve_constant(a: float, b: Tensor) -> Tensor:
    """s[t] = a s[t+1] + b[t] for 0 <= a <= 1, with nothing beyond the end; ``b`` is overwritten.

    A sum over k tokens and the one over the next k make that over 2k, until a^k is no number of the dtype any more:
    twice as fast as :func:`solve`, in passes that read neither coefficients nor every other element.
    """
    s, spare, k = b, torch.empty_like(b), 1
    while k < b.shape[-1] and a >= torch.finfo(b.dtype).tiny:
        torch.add(s[..., :-k], s[..., k:], alpha=a, out=spare[..., :-k])
        spare[..., -k:] = s[..., -k:]
        s, spare, k, a = spare, s, 2 * k, a * a
    return s


def solve_packed(a: Tensor, b: Tensor, initial: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """S[t] and S[t+1] of packed tokens."""
    full = cu_seqlens.diff() > 0
    ends, beyond = (cu_seqlens[1:] - 1)[full].long(), initial[full].to(b.dtype)
    within, b = a.index_fill(0, ends, 0.0), b.index_add(0, ends, a[ends] * beyond)
    s = b.new_empty(len(b) + 1)
    s[-1] = 0.0
    solve(within, b, s)
    if not bool(s.sum().isfinite()):
        solve(within, b, s, cuts=True)
    return s[:-1], s[1:].index_copy(0, ends, beyond)
