"""Selection by the mask, moments over the valid entries, and the checks of shapes and dtypes of every primitive.

A mask is bool and has the shape of the tokens, padded ``(B, T)`` or packed ``(N,)``. Values on masked tokens are never
read: even NaN there changes neither a value nor a gradient.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeGuard, get_args

import torch
from torch import Tensor

from rlprims.ended import LABELS, EndedName
from rlprims.kernels import are_readable
from rlprims.types import CuSeqlens, EndedCodes, PerToken, RowMask, TokenMask


def upcast(x: Tensor) -> Tensor:
    """``x`` as float32, or as float64 if it already is: the precision of all computations here."""
    return x if x.dtype is torch.float64 else x.float()


def zero_outside(x: PerToken, mask: TokenMask) -> PerToken:
    """``x`` in float32 (or float64 if given), exactly 0 where the mask is False.

    This is a selection: NaN and Inf outside the mask change neither the value nor the gradient. A product would not do.

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


class BatchMoments(NamedTuple):
    """Mean and variance of the valid entries, in float64, and each valid entry minus the mean (0 elsewhere)."""

    mean: Tensor
    variance: Tensor
    centred: Tensor


def batch_moments(x: Tensor, mask: Tensor, *, ddof: int, all_reduce: Callable[[Tensor], Tensor] | None) -> BatchMoments:
    """The moments of ``x`` where the mask is True, in two passes; the variance has the divisor n − ddof.

    Sums are in float64, where the square of any float32 is finite. ``all_reduce`` sums over ranks.

    >>> batch_moments(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]), ddof=1, all_reduce=None).centred
    tensor([-1.,  1.,  0.])
    """
    x = zero_outside(x, mask)
    size, total = _over_ranks(all_reduce, mask.sum().double(), x.sum(dtype=torch.float64))
    n = size.clamp(min=1)
    mean = total / n
    if x.dtype is torch.float64:  # of equal entries the mean is then exactly their value, and the variance 0
        (rest,) = _over_ranks(all_reduce, zero_outside(x - mean, mask).sum())
        mean = mean + rest / n
    centred = zero_outside(x.double() - mean, mask)
    (squares,) = _over_ranks(all_reduce, centred.square().sum())
    return BatchMoments(mean, squares / (size - ddof).clamp(min=1), centred.to(x.dtype))


def _over_ranks(all_reduce: Callable[[Tensor], Tensor] | None, *sums: Tensor) -> tuple[Tensor, ...]:
    return sums if all_reduce is None else all_reduce(torch.stack(sums)).unbind()


def check_tensors(**named: object) -> None:
    """Raise ``ValueError`` unless every named argument is a torch tensor.

    >>> check_tensors(rewards=[0.0, 1.0])
    Traceback (most recent call last):
    ...
    ValueError: rewards is a list, expected a torch.Tensor: use torch.as_tensor(rewards)
    """
    for name, x in named.items():
        if not isinstance(x, Tensor):
            labels = name in ("group_ids", "trajectory_ids")
            use = "grouping.dense_ids(labels), which takes any labels" if labels else f"torch.as_tensor({name})"
            use = "layout.cu_seqlens(lengths)" if name == "cu_seqlens" else use
            for part in ("logits", "values"):  # of a model's output, of the weights of a correction
                use = f"its .{part}" if isinstance(getattr(x, part, None), Tensor) else use
            raise ValueError(f"{name} is a {type(x).__name__}, expected a torch.Tensor: use {use}")


def check_tokens(response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, **per_token: Tensor) -> None:
    """Raise ``ValueError`` unless the mask is bool and every named tensor has its shape, padded or packed.

    It is also an error if ``old_log_probs`` require a gradient and ``log_probs`` do not: the two were swapped.

    >>> check_tokens(torch.ones(2, 3, dtype=torch.bool), rewards=torch.zeros(2, 4))
    Traceback (most recent call last):
    ...
    ValueError: rewards has shape (2, 4), response_mask has (2, 3): both must be per token, padded (B, T) or packed (N,)
    """
    check_tensors(response_mask=response_mask, **per_token)
    dtype, shape = response_mask.dtype, tuple(response_mask.shape)
    if dtype is not torch.bool:
        raise ValueError(f"response_mask has dtype {dtype}, expected torch.bool: pass response_mask.bool()")
    if cu_seqlens is None and len(shape) != 2:
        raise ValueError(f"response_mask has shape {shape}, expected (B, T); packed tokens (N,) need cu_seqlens")
    if cu_seqlens is not None:
        check_tensors(cu_seqlens=cu_seqlens)
        if len(shape) != 1:
            raise ValueError(f"response_mask has shape {shape}, expected (N,) because cu_seqlens is given")
        if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.shape[0] < 1:
            raise ValueError(
                f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}, "
                "expected integers (B+1,): the cumulative lengths, starting with 0; use layout.cu_seqlens(lengths)"
            )
        if are_readable(cu_seqlens, response_mask):
            check_cu_seqlens(cu_seqlens, response_mask.shape[0])
    check_placements(0 if cu_seqlens is None else -1, response_mask=response_mask, **per_token)
    for name, tensor in per_token.items():
        if tensor.shape != response_mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, response_mask has {shape}: "
                "both must be per token, padded (B, T) or packed (N,)"
            )
    _check_order(per_token)


_TRAINED = {"log_probs": ("old_log_probs", "rollout_log_probs", "ref_log_probs"), "new_values": ("values", "returns")}


def _check_order(per_token: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` if a fixed input requires a gradient and the trained one beside it does not."""
    for trained, fixed in _TRAINED.items():
        with_grad = [name for name in (trained, *fixed) if name in per_token and per_token[name].requires_grad]
        if trained in per_token and with_grad and trained not in with_grad and torch.is_grad_enabled():
            note = "; verl's functions take the old ones first" if trained == "log_probs" else ""
            raise ValueError(
                f"{with_grad[0]} requires a gradient and {trained} does not, expected the other way round: pass them "
                f"by name, {trained}=..., {with_grad[0]}=...{note}"
            )


def check_sequences(response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, **per_sequence: Tensor) -> None:
    """Raise ``ValueError`` unless the mask is as :func:`check_tokens` wants it, and every named tensor is ``(B,)``."""
    check_tokens(response_mask, cu_seqlens)
    check_tensors(**per_sequence)
    sequences = response_mask.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for name, tensor in per_sequence.items():
        if tensor.shape != (sequences,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({sequences},): one entry per sequence")


def ended_by(ended: EndedCodes, reasons: tuple[EndedName, ...]) -> RowMask:
    """True where a response ended for one of these reasons; raises ``ValueError`` unless ``ended`` is integers (B,).

    >>> from rlprims.ended import Ended
    >>> ended_by(torch.tensor([Ended.STOP, Ended.LENGTH, Ended.ERROR]), ("length", "context")).tolist()
    [False, True, False]
    """
    if ended.dim() != 1 or ended.is_floating_point() or ended.dtype is torch.bool:
        raise ValueError(
            f"ended has shape {tuple(ended.shape)} and dtype {ended.dtype}, expected integers (B,): codes of Ended, "
            "such as Ended.LENGTH for a truncated response and Ended.STOP for a complete one"
        )
    has_reason = torch.zeros_like(ended, dtype=torch.bool)
    for reason in reasons:
        check_choice("reasons", reason, EndedName)
        has_reason = has_reason | (ended == LABELS.index(reason))
    return has_reason


def check_cu_seqlens(cu_seqlens: CuSeqlens, tokens: int) -> None:
    """Raise ``ValueError`` unless the boundaries start at 0, never decrease, and end at the number of tokens.

    Every primitive checks tensors on a CPU, and does not read values from an accelerator, because that waits for it.

    >>> check_cu_seqlens(torch.tensor([0, 2]), 4)
    Traceback (most recent call last):
    ...
    ValueError: cu_seqlens runs from 0 to 2, expected 0 to 4, the number of packed tokens: use layout.cu_seqlens
    """
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != tokens:
        raise ValueError(
            f"cu_seqlens runs from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}, expected 0 to {tokens}, "
            "the number of packed tokens: use layout.cu_seqlens"
        )
    if (cu_seqlens.diff() < 0).any():
        raise ValueError("cu_seqlens decreases, expected cumulative lengths: use layout.cu_seqlens(lengths)")


def check_placements(last_cut: int, **named: Tensor) -> None:
    """Raise ``ValueError`` for a DTensor that torch would gather: partial, or sharded after dimension ``last_cut``."""
    for name, x in named.items():
        for placement in () if type(x) is Tensor else getattr(x, "placements", ()):
            if placement.is_partial() or any(placement.is_shard(dim) for dim in range(last_cut + 1, x.dim())):
                raise ValueError(
                    f"{name} is a DTensor with placement {placement!r}, expected Replicate or a Shard of rows; use "
                    f"{name}.to_local(), with a types.VocabShard if the vocabulary is sharded, and with "
                    "all_reduce_rows or shard if sequences are"
                )


def check_logits(logits: Tensor, temperature: float) -> None:
    """Raise ``ValueError`` unless logits are floats (..., V) and the temperature is above 0."""
    check_tensors(logits=logits)
    check_placements(logits.dim() - 2, logits=logits)
    if logits.dim() < 1 or not logits.is_floating_point():
        raise ValueError(f"logits has shape {tuple(logits.shape)} and dtype {logits.dtype}, expected floats (..., V)")
    check_temperature(temperature)


def check_temperature(temperature: float) -> None:
    """Raise ``ValueError`` unless the temperature is above 0."""
    check_above(0, ": greedy decoding has log-prob 0", temperature=temperature)


def check_range(low: float, high: float, note: str = "", /, **numbers: float | None) -> None:
    """Raise ``ValueError`` unless every named number is in [low, high], which NaN is not; None is legal.

    >>> check_range(0, 1, gamma=0.99, lam=1.5)
    Traceback (most recent call last):
    ...
    ValueError: lam=1.5, expected a number in [0, 1]
    """
    for name, number in numbers.items():
        if _is_given(number, name) and not low <= number <= high:
            expected = f"in [{low}, {high}]" if high < math.inf else f"of at least {low}"
            raise ValueError(f"{name}={number}, expected a number {expected}{note}")


def check_at_least(low: float, note: str = "", /, *, inf: bool = False, **numbers: float | None) -> None:
    """Raise ``ValueError`` unless every named number is at least ``low``, and finite unless ``inf``; None is legal."""
    check_range(low, math.inf, note, **numbers)
    check_finite(**({} if inf else numbers))


def check_above(low: float, note: str = "", /, *, inf: bool = False, **numbers: float | None) -> None:
    """Raise ``ValueError`` unless every named number is above ``low``, and finite unless ``inf``; None is legal."""
    for name, number in numbers.items():
        if _is_given(number, name) and not number > low:
            raise ValueError(f"{name}={number}, expected a number above {low}{note}")
    check_finite(**({} if inf else numbers))


def check_finite(**numbers: float | None) -> None:
    """Raise ``ValueError`` if a named number is NaN or infinite; None is legal."""
    for name, number in numbers.items():
        if _is_given(number, name) and not -math.inf < number < math.inf:
            raise ValueError(f"{name}={number}, expected a finite number")


def _is_given(number: float | None, name: str) -> TypeGuard[float]:
    if isinstance(number, str):
        raise ValueError(f"{name}={number!r} is a text, expected a number")
    return number is not None


def check_deviation(ddof: int, **eps: float) -> None:
    """Raise ``ValueError`` unless a deviation's ``ddof`` is 0 or 1, and what is added to it at least 0."""
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof}, expected 0 or 1: the divisor of the variance is n − ddof")
    check_at_least(0, inf=False, **eps)


def check_choice(name: str, value: str, choices: object) -> None:
    """Raise ``ValueError`` unless the value is one of the choices of a ``Literal``.

    >>> from typing import Literal
    >>> check_choice("level", "word", Literal["token", "sequence"])
    Traceback (most recent call last):
    ...
    ValueError: level='word', expected 'token' or 'sequence'
    """
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}={value!r}, expected {' or '.join(map(repr, allowed))}")
