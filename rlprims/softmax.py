"""Rows of logits to log-probs, entropies and slopes: in blocks, so that no (N, V) copy is made, or by a kernel.

Each row is in computing precision and divided by the temperature.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rlprims import kernels
from rlprims.masking import upcast

_BLOCK_ELEMENTS, _LARGE_BLOCK_ELEMENTS = 2**19, 2**26
"""Elements of one block: in float32 2 MiB, which stay in a cache; a GPU pays a few launches for each."""

_LOG_2 = math.log(2)

_LEAST_POWER = -1100.0
"""2 to it is 0 even in float64; as a factor of that 0, it is as good as the exponent of a banned token, −inf."""

LEAST_LOG_PROB = -100.0
"""Divergences count a banned token (log-prob −inf) as one of e^−100: far away, and still finite."""


def check_logits(logits: Tensor, temperature: float) -> None:
    """Raise ``ValueError`` unless there are floats (..., V) and a temperature above 0."""
    if logits.dim() < 1 or not logits.is_floating_point():
        raise ValueError(f"logits has shape {tuple(logits.shape)} and dtype {logits.dtype}, needs floats (..., V)")
    check_temperature(temperature)


def check_temperature(temperature: float) -> None:
    """Raise ``ValueError`` unless it is above 0."""
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0; greedy decoding has log-prob 0 by definition")


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Slices that cover the rows of (N, V) logits; a compiler sees one block, and makes its own."""
    if torch.compiler.is_compiling():
        return iter((slice(None),))
    elements = _BLOCK_ELEMENTS if logits.device.type == "cpu" else _LARGE_BLOCK_ELEMENTS
    rows = max(1, elements // max(1, logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def log_softmax(block: Tensor, temperature: float) -> Tensor:
    """Of one block, in float32 (or float64 if given): bf16 here would cost 0.05 nats a token."""
    return torch.log_softmax(_scaled(block, temperature), dim=-1)


def write_scores(
    logits: Tensor, token_ids: Tensor, temperature: float, log_probs: Tensor, entropies: Tensor | None
) -> None:
    """Log-probs (N, K) of the rows' tokens, and the rows' entropies (N,) unless None: written, in one sweep."""
    if kernels.chosen("softmax", logits):
        from rlprims.kernels._softmax import softmax as kernel

        log_probs.copy_(kernel(logits, token_ids, temperature, entropies=entropies))
        return
    selected = upcast(logits.gather(1, token_ids))
    peaks, totals, moments = selected.new_empty(3, len(logits), 1)
    room, other = _room(logits), None if entropies is None else _room(logits)
    for rows in row_blocks(logits):
        powers, peaks[rows] = _powers(logits[rows], temperature, room)
        if entropies is None:
            totals[rows] = torch.exp2(powers, out=_part(room, powers)).sum(-1, keepdim=True)
        else:
            w = torch.exp2(powers.clamp_(min=_LEAST_POWER), out=_part(other, powers))
            totals[rows] = w.sum(-1, keepdim=True)
            moments[rows] = w.mul_(powers).sum(-1, keepdim=True)
    log_probs.copy_(_log_probs(selected, peaks, totals, temperature))
    if entropies is not None:
        entropies.copy_(_entropies(totals, moments))


def surprise_slopes(
    logits: Tensor, token_ids: Tensor, temperature: float, slopes: Tensor, entropies: Tensor | None = None
) -> Tensor:
    """Log-probs (N,) of one token a row; temperature · d(−log_probs) / d(logits) is written into ``slopes``.

    These may be the logits themselves, and of a smaller dtype. The rows' entropies (N,) are written, too, unless None.
    """
    ids = token_ids[:, None]
    minus_one = upcast(logits.new_full(ids.shape, -1.0))
    if kernels.chosen("softmax", logits):
        from rlprims.kernels._softmax import softmax as kernel

        of_log_probs = minus_one * temperature
        return kernel(logits, ids, temperature, entropies=entropies, slopes=slopes, of_log_probs=of_log_probs)[:, 0]
    selected = upcast(logits.gather(1, ids))
    peaks, totals, moments = selected.new_empty(3, len(logits), 1)
    room, other = _room(logits), None if entropies is None else _room(logits)
    for rows in row_blocks(logits):
        powers, peaks[rows] = _powers(logits[rows], temperature, room)
        w = torch.exp2(powers, out=_part(room if entropies is None else other, powers))
        totals[rows] = total = w.sum(-1, keepdim=True)
        if entropies is not None:
            moments[rows] = powers.clamp_(min=_LEAST_POWER).mul_(w).sum(-1, keepdim=True)
        # d −log p_a / d z_j = p_j − 1[j = a]
        slopes[rows] = w.mul_(1 / total).scatter_add_(1, ids[rows], minus_one[rows])
    if entropies is not None:
        entropies.copy_(_entropies(totals, moments))
    return _log_probs(selected, peaks, totals, temperature)[:, 0]


def write_slopes(
    slopes: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    of_log_probs: Tensor,
    of_entropies: Tensor | None,
    entropies: Tensor,
) -> None:
    """The gradient of logits for that of log_probs (N, K) and, unless None, of entropies (N,): written into ``slopes``.

    These may be the logits themselves. A row that no loss reads gets exactly 0, whatever stands in it.
    """
    if kernels.chosen("softmax", logits):
        from rlprims.kernels._softmax import softmax as kernel

        kernel(logits, token_ids, temperature, slopes=slopes, of_log_probs=of_log_probs, of_entropies=of_entropies)
        return
    # d log p_a / d z_j = 1[j = a] − p_j and d H / d z_j = −p_j (log p_j + H)
    g = of_log_probs / temperature
    sums, read = g.sum(1, keepdim=True), (g != 0).any(1, keepdim=True)
    if of_entropies is not None:
        h = of_entropies[:, None] / temperature
        read |= h != 0
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[slopes.element_size()]
    kept = -read.to(bits)
    room, other = _room(logits), None if of_entropies is None else _room(logits)
    for rows in row_blocks(logits):
        powers, _ = _powers(logits[rows], temperature, room)
        p = torch.exp2(powers, out=_part(room if of_entropies is None else other, powers))
        total = p.sum(-1, keepdim=True)
        if of_entropies is None:
            p.mul_(-sums[rows] / total)
        else:
            per_bit = -h[rows] * _LOG_2 / total
            rest = per_bit * (entropies[rows, None] / _LOG_2 - total.log2()) - sums[rows] / total
            powers.clamp_(min=_LEAST_POWER)
            p.mul_(torch.addcmul(rest, powers, per_bit, out=_part(room, powers)))
        slopes[rows] = p.scatter_add_(1, token_ids[rows], g[rows])
        # The same as torch.where(read, slopes, 0), which takes a CPU ten times as long, and as exact beside a NaN.
        slopes[rows].view(bits).bitwise_and_(kept[rows])


def _powers(block: Tensor, temperature: float, room: Tensor | None) -> tuple[Tensor, Tensor]:
    """log2 w of each token, in ``room``, and z of the likeliest, whose w is exactly 1: p = w / Σ w.

    ``exp2`` takes a CPU a quarter of the time of ``exp``; and torch's own softmax, which is one operation, adds up in
    sequence, which is inexact.
    """
    z = upcast(block) if room is None or block.dtype is room.dtype else room[: len(block)].copy_(block)
    peaks = z.amax(-1, keepdim=True)
    return torch.sub(z, peaks, out=_part(room, z)).mul_(1 / (temperature * _LOG_2)), peaks


def _log_probs(selected: Tensor, peaks: Tensor, totals: Tensor, temperature: float) -> Tensor:
    """Of the selected logits (N, K), from the rows' peaks and Σ w (N, 1)."""
    return (selected - peaks) / temperature - totals.log()


def _entropies(totals: Tensor, moments: Tensor) -> Tensor:
    """H (N,) from Σ w and Σ w log2 w (N, 1): two terms of one sign, nothing cancels."""
    return (totals.log() - moments * _LOG_2 / totals)[:, 0]


def _room(logits: Tensor) -> Tensor | None:
    """For one block in computing precision, and then for the next; a compiler finds its own."""
    if torch.compiler.is_compiling():
        return None
    rows, width = logits[next(row_blocks(logits), slice(0))].shape
    return logits.new_empty(rows, width, dtype=torch.promote_types(logits.dtype, torch.float32))


def _part(room: Tensor | None, like: Tensor) -> Tensor | None:
    return None if room is None else room[: len(like)]


def _scaled(block: Tensor, temperature: float) -> Tensor:
    return upcast(block) if temperature == 1 else upcast(block) / temperature
