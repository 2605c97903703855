"""The reverse scan on a CPU, in blocks of rows: the maps of four neighbours are composed into one, in place."""

import torch
from torch import Tensor

_STRIDE = 4
"""Positions that are composed into one map. Fewer need more passes; more read memory with a larger stride."""

_BLOCK_ELEMENTS = 2**19
"""Elements of a block of rows: 2 MiB in float32."""


def reverse_scan(a: Tensor, b: Tensor) -> Tensor:
    """S[t] = a[t] S[t+1] + b[t] over the last dimension, as in the formula; without gradients."""
    shape, dtype = torch.broadcast_shapes(a.shape, b.shape), torch.promote_types(a.dtype, b.dtype)
    a, b = (x.to(dtype).expand(shape).reshape(shape[:-1].numel(), shape[-1]) for x in (a, b))
    s = b.new_empty(b.shape)
    _solve_blocks(a, b, s, select=False)
    if not s.sum().isfinite():  # 0 · NaN is NaN: compute again, with a selection where a is 0
        _solve_blocks(a, b, s, select=True)
    return s.view(shape)


def _solve_blocks(a: Tensor, b: Tensor, s: Tensor, *, select: bool) -> None:
    rows = max(1, _BLOCK_ELEMENTS // max(1, b.shape[1]))
    for start in range(0, b.shape[0], rows):
        block = slice(start, start + rows)
        _solve(a[block], b[block], s[block], b.new_zeros(b[block].shape[0]), select)


def _solve(a: Tensor, b: Tensor, s: Tensor, beyond: Tensor, select: bool) -> None:
    """Fill s (R, T), given S beyond the end. ``select``: S[t] is b[t] where a[t] is 0, even if S[t+1] is NaN."""
    length = b.shape[1]
    end = length // _STRIDE * _STRIDE
    for t in range(length - 1, end - 1, -1):  # the last positions, fewer than four
        beyond = _map(a[:, t], beyond, b[:, t], select, s[:, t])
    if end == 0:
        return
    maps = [(a[:, i:end:_STRIDE], b[:, i:end:_STRIDE]) for i in range(_STRIDE)]
    coefficient, addend = maps[-1]
    for a_i, b_i in reversed(maps[:-1]):
        addend = _map(a_i, addend, b_i, select)
        coefficient = _map(a_i, coefficient, torch.zeros_like(a_i), select) if select else a_i * coefficient
    firsts = s.new_empty(s.shape[0], end // _STRIDE + 1)
    firsts[:, -1] = beyond
    _solve(coefficient, addend, firsts[:, :-1], beyond, select)
    s[:, 0:end:_STRIDE] = firsts[:, :-1]
    following = firsts[:, 1:]
    for i in range(_STRIDE - 1, 0, -1):
        a_i, b_i = maps[i]
        following = _map(a_i, following, b_i, select, s[:, i:end:_STRIDE])


def _map(a: Tensor, x: Tensor, b: Tensor, select: bool, out: Tensor | None = None) -> Tensor:
    """a x + b; with ``select`` exactly b where a is 0."""
    y = torch.addcmul(b, a, x, out=out)
    return torch.where(a == 0, b, y, out=out) if select else y
