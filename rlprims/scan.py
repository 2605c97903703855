"""Recurrences from the end of a sequence to its start: S[t] = a[t] S[t+1] + b[t]; values of the next valid token."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlprims.kernels import is_static
from rlprims.layout import expand_to_tokens
from rlprims.masking import zero_outside
from rlprims.types import CuSeqlens, PerSequence, PerToken, SequenceShard, TokenMask

_LONGEST = 2**24
"""The longest recurrence of a graph whose length is dynamic."""


def reverse_scan(a: Tensor, b: Tensor) -> Tensor:
    """S[t] = a[t] S[t+1] + b[t] over the last dimension, with S = 0 beyond the end.

    If a[t] is 0, S[t] is b[t] for any S[t+1], even NaN, so that packed sequences can be separated by a = 0. The
    derivative with respect to a is 0 where a is 0.

    >>> reverse_scan(torch.full((3,), 0.5), torch.tensor([1.0, 2.0, 4.0]))
    tensor([3., 4., 4.])
    """
    return _scan_by_fours(a, b) if is_static(b.shape[-1]) else _scan_by_doubling(a, b)


def _scan_by_fours(a: Tensor, b: Tensor) -> Tensor:
    """The scan in work linear in the length (Blelloch 1990, Prefix sums and their applications).

    The maps of each four neighbours are composed into one, the recurrence of a quarter of the length gives S at the
    first position of each four, and three more steps give S at the others.
    """
    length = b.shape[-1]
    if length <= 1:
        return b
    a, b = (torch.unflatten(pad(x, (0, -length % 4)), -1, (-1, 4)) for x in (a, b))
    steps = list(zip(a.unbind(-1), b.unbind(-1), (a == 0).unbind(-1), strict=True))
    slope, s, _ = steps[-1]
    for a_t, b_t, is_cut in reversed(steps[:-1]):
        s, slope = _step(a_t, s, b_t, is_cut), a_t * torch.where(is_cut, 0.0, slope)
    solved = [_scan_by_fours(slope, s)]
    s = pad(solved[0][..., 1:], (0, 1))
    for a_t, b_t, is_cut in reversed(steps[1:]):
        s = _step(a_t, s, b_t, is_cut)
        solved.insert(1, s)
    return torch.stack(solved, dim=-1).flatten(-2)[..., :length]


def _scan_by_doubling(a: Tensor, b: Tensor) -> Tensor:
    """The scan in a graph of dynamic length: the number of steps and the shapes do not depend on the length.

    After step k the map at t composes those of the 2^k positions from t on (Hillis & Steele 1986).
    """
    torch._check(b.shape[-1] <= _LONGEST)  # type: ignore[no-untyped-call]
    position = torch.arange(b.shape[-1], device=b.device)
    for k in range(_LONGEST.bit_length() - 1):
        following = position + 2**k
        is_inside = following < b.shape[-1]
        following = torch.where(is_inside, following, position)
        is_cut = (a == 0) | ~is_inside
        b, a = _step(a, b[..., following], b, is_cut), a * torch.where(is_cut, 0.0, a[..., following])
    return b


def _step(a: Tensor, s: Tensor, b: Tensor, is_cut: Tensor) -> Tensor:
    """a · s + b, and exactly b at a cut, even if s is NaN."""
    return torch.addcmul(b, a, torch.where(is_cut, 0.0, s))


def discounted_sum(
    x: PerToken,
    discount: float | PerToken,
    mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    shard: SequenceShard | None = None,
    beyond: PerSequence | None = None,
) -> PerToken:
    """S_t = x_t + discount_t · S_{t+1} over the valid tokens of each sequence; S_t = S_{t+1} on masked tokens.

    The recurrence, and a discount per token, are float64: the error of a rounded discount grows with the length.
    ``beyond`` (B,) is S after the whole sequence (None: 0); ``shard``: this rank's part.

    >>> mask = torch.tensor([[True, False, True]])
    >>> discounted_sum(torch.tensor([[1.0, 9.0, 4.0]]), 0.5, mask)
    tensor([[3., 4., 4.]])
    """
    x = zero_outside(x, mask)
    a = torch.where(mask, discount, x.new_ones((), dtype=torch.float64))
    if shard is not None:
        return scan_of_parts(a, x.double(), beyond, mask, cu_seqlens, shard)[0].to(x.dtype)
    b, ends = x.double(), _last_position(mask, cu_seqlens)
    if beyond is not None:
        b = b + torch.where(ends, a * expand_to_tokens(beyond.double(), mask, cu_seqlens), 0.0)
    if cu_seqlens is not None:
        a = torch.where(ends, 0.0, a)
    return reverse_scan(a, b).to(x.dtype)


def sum_from_right(
    x: PerToken, mask: TokenMask, cu_seqlens: CuSeqlens | None = None, shard: SequenceShard | None = None
) -> PerToken:
    """Σ_{u≥t} x_u over the valid tokens of each sequence.

    >>> sum_from_right(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, False, True]]))
    tensor([[5., 4., 4.]])
    """
    if cu_seqlens is not None or shard is not None:
        return discounted_sum(x, 1.0, mask, cu_seqlens, shard)
    return zero_outside(x, mask).flip(-1).cumsum(-1).flip(-1)


def next_values(
    x: PerToken,
    mask: TokenMask,
    beyond: PerSequence | None = None,
    cu_seqlens: CuSeqlens | None = None,
    shard: SequenceShard | None = None,
) -> PerToken:
    """x of the next valid token of the sequence; for the last valid token ``beyond`` (B,), or 0 if None.

    It is the recurrence N_t = x_{t+1} if token t+1 is valid, else N_{t+1}.

    >>> next_values(torch.tensor([[1.0, 9.0, 4.0]]), torch.tensor([[True, False, True]]), torch.tensor([5.0]))
    tensor([[4., 4., 5.]])
    """
    x = zero_outside(x, mask)
    ends = _last_position(mask, cu_seqlens)
    if shard is not None:  # F_t = x_t if t is valid, else F_{t+1}; so N_t = F_{t+1}
        this_or_next, after = scan_of_parts((~mask).to(x.dtype), x, beyond, mask, cu_seqlens, shard)
        return torch.where(ends, expand_to_tokens(after, mask, cu_seqlens), this_or_next.roll(-1, -1))
    after_last = 0.0 if beyond is None else expand_to_tokens(beyond.to(x.dtype), mask, cu_seqlens)
    skips = ~mask.roll(-1, -1) & ~ends
    return reverse_scan(skips.to(x.dtype), torch.where(ends, after_last, x.roll(-1, -1)))


def scan_of_parts(
    a: PerToken,
    b: PerToken,
    beyond: PerSequence | None,
    mask: TokenMask,
    cu_seqlens: CuSeqlens | None,
    shard: SequenceShard,
) -> tuple[PerToken, PerSequence]:
    """S[t] = a[t] S[t+1] + b[t] if each rank has a part of the sequences; and S after this rank's part, (B,).

    Inside a part, S[t] = P[t] S_after + S0[t]: S0 is the recurrence with S_after = 0, and P[t] = a[t] a[t+1] ... up to
    the end of the part. P and S0 of the first token map the S after the part to the S at its start. The ranks exchange
    these two numbers of each sequence, and each rank composes the maps of the parts after its own. ``beyond`` is the S
    after the last part (None: 0). S_after has no gradient.
    """
    ends = _last_position(mask, cu_seqlens)
    inner = torch.where(ends, 0.0, a)
    own = reverse_scan(inner, b)
    weights = reverse_scan(inner, torch.where(ends, a, 0.0))

    has_tokens, first = _first_position(mask, cu_seqlens)
    maps = torch.stack([_take(weights, first).where(has_tokens, 1.0), _take(own, first).where(has_tokens, 0.0)])
    after = torch.zeros_like(maps[0]) if beyond is None else beyond.to(b.dtype)
    gathered = shard.all_gather(maps.detach().clone())
    for weight, value in gathered[shard.part + 1 :].flip(0).unbind():
        after = _step(weight, after, value, weight == 0)
    return _step(weights, expand_to_tokens(after, mask, cu_seqlens), own, weights == 0), after


def _first_position(mask: TokenMask, cu_seqlens: CuSeqlens | None) -> tuple[Tensor, Tensor]:
    """Whether each sequence has a position on this rank, bool (B,); and its first one (undefined if none), (B,)."""
    if cu_seqlens is None:
        has_tokens = torch.full(mask.shape[:1], mask.shape[-1] > 0, device=mask.device)
        return has_tokens, torch.zeros_like(has_tokens, dtype=torch.int64)
    return cu_seqlens.diff() > 0, cu_seqlens[:-1].long()


def _take(x: PerToken, first: Tensor) -> PerSequence:
    """x at the position ``first`` of each sequence; 0 if that position is beyond the end."""
    x = pad(x, (0, 1))
    return x[first] if x.dim() == 1 else x.gather(-1, first[:, None])[:, 0]


def _last_position(mask: TokenMask, cu_seqlens: CuSeqlens | None) -> Tensor:
    """True on the last position of each sequence, whether it is valid or not; (T,) if padded."""
    positions = torch.arange(mask.shape[-1], device=mask.device)
    if cu_seqlens is None:
        return positions == mask.shape[-1] - 1
    return positions == expand_to_tokens(cu_seqlens[1:], mask, cu_seqlens) - 1
