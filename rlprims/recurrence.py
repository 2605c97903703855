"""One linear recurrence for every return: S[t] = a[t] S[t+1] + b[t], from the end of each sequence to its start."""

import torch
from torch import Tensor

from rlprims import kernels
from rlprims.masking import sequence_ids
from rlprims.types import CuSeqlens, PerSequence, PerToken


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
    of one buffer.

    >>> a, b = torch.full((1, 3), 0.5), torch.tensor([[1.0, 2.0, 4.0]])
    >>> reverse_recurrence(a, b, torch.zeros(1))
    (tensor([[3., 4., 4.]]), tensor([[4., 4., 0.]]))
    """
    tensors = (coefficient, addend, initial)
    if kernels.chosen(*tensors) and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return _by_kernel(coefficient, addend, initial, cu_seqlens)
    s = addend.new_empty((*addend.shape[:-1], addend.shape[-1] + 1))
    if cu_seqlens is None:
        s[:, -1] = initial
        _solve(coefficient, addend, s)
        return s[:, :-1], s[:, 1:]
    owner = sequence_ids(cu_seqlens, len(addend))
    end = torch.arange(len(addend), device=addend.device) + 1 == cu_seqlens[1:][owner]
    beyond = initial[owner]
    s[-1] = 0.0
    _solve(torch.where(end, 0.0, coefficient), torch.where(end, addend + coefficient * beyond, addend), s, cuts=True)
    return s[:-1], torch.where(end, beyond, s[1:])


def _by_kernel(
    coefficient: PerToken, addend: PerToken, initial: PerSequence, cu_seqlens: CuSeqlens | None
) -> tuple[PerToken, PerToken]:
    from rlprims.kernels._scan import reverse_scan

    if cu_seqlens is None:
        cu_seqlens = torch.arange(len(addend) + 1, device=addend.device) * addend.shape[-1]
    a, b, first = (x.to(addend.dtype).contiguous() for x in (coefficient, addend, initial))
    s, received = reverse_scan(a.flatten(), b.flatten(), first, cu_seqlens.contiguous())
    return s.view_as(addend), received.view_as(addend)
