"""Rows of logits to log-probs, entropies and slopes: in blocks, so that no (N, V) copy is made, or by a kernel.

Each row is in computing precision and divided by the temperature.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlprims import kernels
from rlprims.masking import upcast

_BLOCK_ELEMENTS, _LARGE_BLOCK_ELEMENTS = 2**18, 2**26
"""Elements of one block: in float32 1 MiB, which stays in a core's cache; a GPU pays a few launches for each."""

_LEAST_LOG = -1000.0
"""Below it a probability is 0 even in float64; as a factor of it, it is as good as the log of a banned token, −inf."""

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
    for rows in row_blocks(logits):
        if entropies is None:
            log_probs[rows] = log_softmax(logits[rows], temperature).gather(1, token_ids[rows])
        else:
            w, below, total, top = _apart(logits[rows], temperature)
            log_probs[rows] = below.gather(1, token_ids[rows]) + top
            # Two terms of one sign: nothing cancels.
            entropies[rows] = -w.mul_(below.clamp_(min=_LEAST_LOG)).sum(-1) / total[:, 0] - top[:, 0]


def surprise_slopes_(logits: Tensor, token_ids: Tensor, temperature: float, entropies: Tensor | None = None) -> Tensor:
    """Log-probs (N,) of one token a row; the logits become temperature · d(−log_probs) / d(logits) in place.

    The rows' entropies (N,) are written, too, unless None.
    """
    ids = token_ids[:, None]
    minus_one = logits.new_full(ids.shape, -1.0)
    if kernels.chosen("softmax", logits):
        from rlprims.kernels._softmax import softmax as kernel

        of_log_probs = minus_one * temperature
        return kernel(logits, ids, temperature, entropies=entropies, slopes=logits, of_log_probs=of_log_probs)[:, 0]
    log_probs = upcast(logits.new_empty(len(logits)))
    for rows in row_blocks(logits):
        w, below, total, top = _apart(logits[rows], temperature)
        log_probs[rows] = (below.gather(1, ids[rows]) + top)[:, 0]
        if entropies is not None:
            entropies[rows] = -below.clamp_(min=_LEAST_LOG).mul_(w).sum(-1) / total[:, 0] - top[:, 0]
        # d −log p_a / d z_j = p_j − 1[j = a]
        logits[rows] = w.div_(total).scatter_add_(1, ids[rows], minus_one[rows])
    return log_probs


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
    for rows in row_blocks(logits):
        # d log p_a / d z_j = 1[j = a] − p_j and d H / d z_j = −p_j (log p_j + H)
        g = of_log_probs[rows] / temperature
        sums, read = g.sum(1, keepdim=True), (g != 0).any(1, keepdim=True)
        if of_entropies is None:
            p = torch.softmax(_scaled(logits[rows], temperature), dim=-1)
            p.mul_(-sums / p.sum(-1, keepdim=True))
        else:
            h = of_entropies[rows, None] / temperature
            read |= h != 0
            p, below, total, top = _apart(logits[rows], temperature)
            factor = below.clamp_(min=_LEAST_LOG).add_(top + entropies[rows, None])
            p.mul_(factor.mul_(-h / total).sub_(sums / total))
        p.scatter_add_(1, token_ids[rows], g)
        # The same as torch.where(read, p, 0), which takes a CPU ten times as long, and as exact beside a NaN.
        bits = torch.int64 if p.dtype is torch.float64 else torch.int32
        p.view(bits).bitwise_and_(-read.to(bits))
        slopes[rows] = p


def _apart(block: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w, z − max z, Σ w, and the log-prob of the likeliest token: p = w / Σ w, and log p is the sum of 2nd and 4th.

    The likeliest token says what the normalizer is; its probability is at least 1 / V, so that no log is of 0.
    """
    scaled = _scaled(block, temperature)
    below = scaled - scaled.amax(-1, keepdim=True)
    if torch.compiler.is_compiling():  # then all sums are of one loop
        w = below.exp()
        total = w.sum(-1, keepdim=True)
        return w, below, total, -total.log()
    # ``exp`` alone costs a CPU more than all of torch's softmax; but that adds up in sequence, which is inexact.
    w = torch.softmax(scaled, dim=-1)
    total = w.sum(-1, keepdim=True)
    return w, below, total, (w.amax(-1, keepdim=True) / total).log()


def _scaled(block: Tensor, temperature: float) -> Tensor:
    return upcast(block) if temperature == 1 else upcast(block) / temperature
