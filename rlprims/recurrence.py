"""One linear recurrence for every return: S[t] = a[t] S[t+1] + b[t], from the end of each sequence to its start."""

import torch
from torch import Tensor

from rlprims import _recurrence_cpu, kernels
from rlprims.blocks import all_valid
from rlprims.layout import sequence_ids
from rlprims.masking import as_numbers, count, zero_outside
from rlprims.types import CuSeqlens, PerSequence, PerToken, TokenMask


def _map(a: Tensor, x: Tensor, b: Tensor, cuts: bool) -> Tensor:
    y = torch.addcmul(b, a, x)
    # A selection and not a coefficient 0: a NaN of the next sequence must stay there.
    return torch.where(a == 0, b, y) if cuts else y


def _solve(a: Tensor, b: Tensor, s: Tensor, cuts: bool = False) -> None:
    """Fill s so that s[t] = a[t] s[t+1] + b[t]; s is one longer than a and b, and its last entry is given.

    Neighbours are composed in pairs; the recurrence of the pairs, half as long, is solved the same way and gives every
    other position; one more map gives the ones between.
    """
    end = b.shape[-1] // 2 * 2
    if end < b.shape[-1]:
        s[..., -2] = _map(a[..., -1], s[..., -1], b[..., -1], cuts)
    if end:
        left, right = slice(0, end, 2), slice(1, end, 2)
        pairs = s.new_empty((*s.shape[:-1], end // 2 + 1))
        pairs[..., -1] = s[..., end]
        zero = torch.zeros_like(a[..., left])  # 0 · a[right]: a cut stays one, whatever is beyond it
        coefficient = _map(a[..., left], a[..., right], zero, cuts)
        _solve(coefficient, _map(a[..., left], b[..., right], b[..., left], cuts), pairs, cuts)
        s[..., left] = pairs[..., :-1]
        s[..., right] = _map(a[..., right], pairs[..., 1:], b[..., right], cuts)


def reverse_recurrence(
    coefficient: PerToken, addend: PerToken, initial: PerSequence, cu_seqlens: CuSeqlens | None = None
) -> tuple[PerToken, PerToken]:
    """Solve S[t] = a[t] S[t+1] + b[t] with S = ``initial`` beyond each sequence's end.

    Returns:
        S[t], and S[t+1]: what each position received from its right.

    Neighbours are composed in pairs and the half as long recurrence of the pairs is solved the same way, so the work is
    linear in T, the depth logarithmic, and no position is visited in a loop. For padded input the two results are views
    of one buffer. On a CPU, where no gradient is asked, ``_recurrence_cpu`` gives the same numbers sooner.

    >>> a, b = torch.full((1, 3), 0.5), torch.tensor([[1.0, 2.0, 4.0]])
    >>> reverse_recurrence(a, b, torch.zeros(1))
    (tensor([[3., 4., 4.]]), tensor([[4., 4., 0.]]))
    """
    tensors = (coefficient, addend, initial)
    if kernels.chosen("scan", *tensors) and not _has_gradient(*tensors):
        return _by_kernel(coefficient, addend, initial, cu_seqlens)
    in_place = _may_be_in_place(addend, coefficient, initial)
    if in_place and cu_seqlens is not None:
        return _recurrence_cpu.solve_packed(coefficient, addend, initial, cu_seqlens)
    s = addend.new_empty((*addend.shape[:-1], addend.shape[-1] + 1))
    if cu_seqlens is None:
        s[:, -1] = initial
        (_recurrence_cpu.solve if in_place else _solve)(coefficient, addend, s)
        return s[:, :-1], s[:, 1:]
    owner = sequence_ids(cu_seqlens, len(addend))
    end = torch.arange(len(addend), device=addend.device) + 1 == cu_seqlens[1:][owner]
    beyond = initial[owner]
    s[-1] = 0.0
    _solve(torch.where(end, 0.0, coefficient), torch.where(end, addend + coefficient * beyond, addend), s, cuts=True)
    return s[:-1], torch.where(end, beyond, s[1:])


def skipping_recurrence(
    discount: float | PerToken,
    addend: PerToken,
    mask: TokenMask,
    initial: PerSequence | None = None,
    cu_seqlens: CuSeqlens | None = None,
) -> tuple[PerToken, PerToken]:
    """:func:`reverse_recurrence` with the coefficient ``discount`` on valid tokens and 1 on masked ones.

    Args:
        discount: one number, or one per token.
        addend: 0 on masked tokens, which thus hand on what they got.
        mask: which tokens are valid.
        initial: S beyond each sequence's end; None: 0.
        cu_seqlens: int (B+1,) if packed.

    Returns:
        S[t], and S[t+1]: what each position received from its right. What stands on masked tokens means nothing.

    >>> mask = torch.tensor([[True, False, True]])
    >>> skipping_recurrence(0.5, torch.tensor([[1.0, 0.0, 4.0]]), mask)[0]
    tensor([[3., 4., 4.]])
    """
    if cu_seqlens is None and isinstance(discount, float | int) and discount == 1:
        return _sums(addend, initial)
    if isinstance(discount, Tensor):
        coefficient = discount if all_valid(mask) else zero_outside(discount, mask) + as_numbers(~mask, addend.dtype)
    else:
        if cu_seqlens is None and 0 <= discount <= 1 and _may_be_in_place(addend, initial):
            if all_valid(mask) or _one_run_each(mask):
                return _over_runs(discount, addend, mask, initial)
            if (s := _recurrence_cpu.solve_masked(discount, addend, mask, initial)) is not None:
                return s[:, :-1], s[:, 1:]
        coefficient = discount * as_numbers(mask, addend.dtype) + as_numbers(~mask, addend.dtype)
    if initial is None:
        initial = addend.new_zeros(len(addend) if cu_seqlens is None else len(cu_seqlens) - 1)
    return reverse_recurrence(coefficient, addend, initial.to(addend.dtype), cu_seqlens)


def _has_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _may_be_in_place(addend: Tensor, *others: Tensor | None) -> bool:
    on_cpu = addend.device.type == "cpu" and not torch.compiler.is_compiling()
    return on_cpu and not _has_gradient(addend, *others) and not kernels.chosen("scan", addend)


def sums_from_right(x: PerToken, cu_seqlens: CuSeqlens | None = None) -> PerToken:
    """Σ_{u≥t} x_u within each sequence.

    >>> sums_from_right(torch.tensor([[1.0, 2.0, 4.0]]))
    tensor([[7., 6., 4.]])
    """
    if cu_seqlens is None:
        return x.flip(1).cumsum(1).flip(1)  # on a CPU torch sums in float64
    return reverse_recurrence(torch.ones_like(x), x, x.new_zeros(len(cu_seqlens) - 1), cu_seqlens)[0]


def _sums(addend: PerToken, initial: PerSequence | None) -> tuple[PerToken, PerToken]:
    """Every coefficient is 1."""
    beyond = addend.new_zeros(len(addend)) if initial is None else initial.to(addend.dtype)
    s = sums_from_right(torch.cat([addend, beyond[:, None]], dim=1))
    return s[:, :-1], s[:, 1:]


def _one_run_each(mask: TokenMask) -> bool:
    """Whether the valid tokens of every row are neighbours."""
    m = mask.view(torch.int8)
    begins = m[:, 1:] > m[:, :-1]
    further = int(count(begins))
    if not 0 < further <= len(mask):  # none, the usual case; or more than one in some row
        return not further
    return bool((begins.view(torch.int8).sum(-1) + m[:, 0] <= 1).all())


def _over_runs(
    discount: float, addend: PerToken, mask: TokenMask, initial: PerSequence | None
) -> tuple[PerToken, PerToken]:
    """One coefficient everywhere: all that is beyond a run is its ``initial``, set right behind it."""
    length = addend.shape[1]
    b = addend.new_empty((len(addend), _recurrence_cpu.width(length + 1)))
    b[:, :length] = addend
    b[:, length:] = 0.0
    if initial is not None:
        never_none = torch.nn.functional.pad(mask, (1, 0), value=True)
        behind = length - never_none.flip(1).view(torch.int8).argmax(1)
        b[torch.arange(len(b)), behind] = initial.to(b.dtype)
    s = _recurrence_cpu.solve_constant(discount, b)
    return s[:, :length], s[:, 1 : length + 1]


def _by_kernel(
    coefficient: PerToken, addend: PerToken, initial: PerSequence, cu_seqlens: CuSeqlens | None
) -> tuple[PerToken, PerToken]:
    from rlprims.kernels._scan import reverse_scan

    if cu_seqlens is None:
        cu_seqlens = torch.arange(len(addend) + 1, device=addend.device) * addend.shape[-1]
    a, b, first = (x.to(addend.dtype).contiguous() for x in (coefficient, addend, initial))
    s, received = reverse_scan(a.flatten(), b.flatten(), first, cu_seqlens.contiguous())
    return s.view_as(addend), received.view_as(addend)
