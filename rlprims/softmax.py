"""Rows of logits in blocks, so that no (N, V) copy is made: each in computing precision, divided by temperature."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlprims.masking import upcast

_BLOCK_ELEMENTS, _LARGE_BLOCK_ELEMENTS = 2**18, 2**26
"""Elements of one block: in float32 1 MiB, which stays in a core's cache; a GPU pays a few launches for each block."""

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
    """Slices that cover the rows of (N, V) logits."""
    elements = _BLOCK_ELEMENTS if logits.device.type == "cpu" else _LARGE_BLOCK_ELEMENTS
    rows = max(1, elements // max(1, logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def log_softmax(block: Tensor, temperature: float) -> Tensor:
    """Of one block, in float32 (or float64 if given): bf16 here would cost 0.05 nats a token."""
    return torch.log_softmax(_scaled(block, temperature), dim=-1)


def softmax(block: Tensor, temperature: float) -> Tensor:
    """Of one block, in the same precision."""
    return torch.softmax(_scaled(block, temperature), dim=-1)


def softmax_and_log(block: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Both, for less than twice the price of one: ``exp`` alone costs more than all of torch's softmax."""
    scaled = _scaled(block, temperature)
    p = torch.softmax(scaled, dim=-1)
    # The likeliest token says what the normalizer is; its probability is at least 1 / V, so that no log is of 0.
    log_p = (scaled - scaled.amax(-1, keepdim=True)).add_(p.amax(-1, keepdim=True).log())
    return p, log_p


def _scaled(block: Tensor, temperature: float) -> Tensor:
    return upcast(block) if temperature == 1 else upcast(block) / temperature
