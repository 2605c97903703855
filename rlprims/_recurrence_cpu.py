"""The linear recurrence on a CPU, without gradients: ``rlprims.recurrence`` says what is solved, and is the oracle.

All ways write into memory that is there, and expect what fits a core's cache: blocks of ``rlprims.blocks``. Where there
is one coefficient, triangular products of 16 tokens do in one pass what composing neighbours does in four.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_STRIDE = 4
"""Positions that are composed into one. Fewer make more passes, more read memory in wider steps; 4 was fastest."""

_CHUNK = 16
"""Tokens of one triangular product; 32 and 64 take 1.4 and 2 times as long."""

_WHOLE = 128
"""Rows up to this width are one product."""

_LEAST, _EXPONENTS = 0.5, 800.0
"""Where tokens are skipped, powers of less, or over a row of more binary orders than this, are not divided by."""


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
    """s[t] = a s[t+1] + b[t] for 0 <= a <= 1, nothing beyond the end. ``b`` is (B, :func:`width`), and may be lost."""
    if not (a > 0 and _products_are_exact(b.dtype)):
        return _by_doubling(a, b)
    s = _by_products(a, b)
    return s if _all_finite(s) else torch.where(s[:, :1].isfinite(), s, _by_doubling(a, b))


def solve_masked(a: float, b: Tensor, mask: Tensor, initial: Tensor | None) -> Tensor | None:
    """s[t] = a s[t+1] + b[t] on valid tokens, s[t+1] on others: (B, T + 1), the last ``initial``. None: ask ``solve``.

    With p[t], a to the power of how many tokens of its chunk are valid from t on, s[t] = p[t] (x[t] + s at the chunk's
    end) where x sums b / p from t on: a product with ones. From chunk to chunk it is the same, in float64. None where
    products are rounded, or a power could be no number.
    """
    rows, length = b.shape
    if a < _LEAST or -math.log2(a) * length > _EXPONENTS or not _products_are_exact(b.dtype):
        return None
    q = b.new_empty(rows, (length // _CHUNK + 1) * _CHUNK)  # one token beyond the end at least, and those are masked
    q[:, :length] = mask.view(torch.int8)
    q[:, length:] = 0.0
    ones, pad = _powers(1.0, _CHUNK, b.dtype)[:-1], torch.nn.functional.pad
    p = torch.mm(q.view(-1, _CHUNK), ones * math.log2(a), out=q.new_empty(q.numel() // _CHUNK, _CHUNK))
    exponents = p[:, 0].view(rows, -1).flip(1).double()
    torch.div(b, p.exp2_().view(rows, -1)[:, :length], out=q[:, :length])
    x = torch.mm(q.view(-1, _CHUNK), ones, out=torch.empty_like(p)).view(rows, -1, _CHUNK)
    powers = pad(exponents[:, :-1], (1, 0)).cumsum(1).exp2_()
    given = pad((x[..., 0].flip(1) / powers)[:, :-1], (1, 0))
    if initial is not None:
        given[:, 0] = initial
    received = given.cumsum(1).mul_(powers).flip(1).to(b.dtype)
    s = x.add_(received[..., None]).mul_(p.view_as(x)).view(rows, -1)[:, : length + 1]
    if _all_finite(s):
        return s
    plainly = torch.empty_like(s)
    plainly[:, -1] = 0.0 if initial is None else initial
    solve(torch.where(mask, a, torch.ones_like(b)), b, plainly)
    return torch.where(s[:, :1].isfinite(), s, plainly)


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


def width(length: int) -> int:
    """The next width from ``length`` on that is one product, or whole chunks."""
    return length if length <= _WHOLE else -(-length // _CHUNK) * _CHUNK


def _by_products(a: float, b: Tensor) -> Tensor:
    """A triangular product within chunks; their first sums obey the same recurrence, and go to the chunk before."""
    if b.shape[-1] <= _WHOLE:
        return torch.mm(b, _powers(a, b.shape[-1], b.dtype)[:-1], out=torch.empty_like(b))
    powers = _powers(a, _CHUNK, b.dtype)
    s = torch.empty_like(b)
    torch.mm(b.view(-1, _CHUNK), powers[:-1], out=s.view(-1, _CHUNK))
    count = b.shape[-1] // _CHUNK
    chunks = s.view(-1, count, _CHUNK)
    firsts = b.new_empty(len(b), width(count))
    firsts[:, :count] = chunks[..., 0]
    firsts[:, count:] = 0.0
    received, left = _by_products(a**_CHUNK, firsts)[:, 1:count, None], chunks[:, :-1]
    torch.addcmul(left, received, powers[-1], out=left)
    return s


@lru_cache(64)
def _powers(a: float, n: int, dtype: torch.dtype) -> Tensor:
    """(n + 1, n): a^(u − t) in row u >= t, else 0. The last row is what n tokens get of what is beyond them."""
    steps = np.arange(n + 1)[:, None] - np.arange(n)
    return torch.from_numpy(np.where(steps < 0, 0.0, a ** np.maximum(steps, 0.0))).to(dtype)


def _products_are_exact(dtype: torch.dtype) -> bool:
    """Whether a user did not ask for products of float32 in fewer bits; ``out=`` is out of autocast's reach."""
    try:
        return dtype is torch.float64 or torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # torch's newer settings, which differ from backend to backend
        return False


def _all_finite(s: Tensor) -> bool:
    """A product takes 0 times everything else in its rows: what is not finite anywhere reaches their first tokens.

    Such rows, and no others, are solved without products.
    """
    return bool(s[:, 0].sum().isfinite())


def _by_doubling(a: float, b: Tensor) -> Tensor:
    """A sum over k tokens and the one over the next k make that over 2k, until a^k is no number any more."""
    s, spare, k = b, torch.empty_like(b), 1
    while k < b.shape[-1] and a >= torch.finfo(b.dtype).tiny:
        torch.add(s[..., :-k], s[..., k:], alpha=a, out=spare[..., :-k])
        spare[..., -k:] = s[..., -k:]
        s, spare, k, a = spare, s, 2 * k, a * a
    return s
