"""Rows of logits in blocks, so that no (N, V) copy is made: each in computing precision, divided by temperature."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlprims.masking import upcast

_BLOCK_ELEMENTS = 2**18
"""Elements of one block: a temporary of this size stays in a core's cache, in float32 1 MiB."""

LEAST_LOG_PROB = -100.0
"""Divergences count a banned token (log-prob −inf) as one of e^−100: far away, and still finite."""


def check_logits(logits: Tensor, temperature: float) -> None:
    """Raise ``ValueError`` unless there are floats (..., V) and a temperature above 0."""
    if logits.dim() < 1 or not logits.is_floating_point():
        raise ValueError(f"logits has shape {tuple(logits.shape)} and dtype {logits.dtype}, needs floats (..., V)")
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0; greedy decoding has log-prob 0 by definition")


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Slices that cover the rows of (N, V) logits."""
    rows = max(1, _BLOCK_ELEMENTS // max(1, logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(logits), rows))


def log_softmax(block: Tensor, temperature: float) -> Tensor:
    """Of one block, in float32 (or float64 if given): bf16 here would cost 0.05 nats a token."""
    return torch.log_softmax(upcast(block) / temperature, dim=-1)
