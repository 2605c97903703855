"""The LM head apart from its model: what becomes of the last hidden states without logits of all tokens at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlprims.execution.hf._packed import probe

LEAST_VOCABULARY = 1024
"""Below it a loss in tiles saves less than it costs to ask for one; of token-wise losses."""

LARGE_VOCABULARY = 8192
"""From here on logits are never whole, of no loss and no score: for some losses that costs a fourth product."""

_SOFT_CAP = "final_logit_softcapping"
"""Where a model's config has c of c · tanh(logits / c), as Gemma 2 and 3 have."""


class Head(NamedTuple):
    """One matrix without a bias, and perhaps a soft cap on what it gives."""

    weight: Tensor
    soft_cap: float | None


def head_of(model: nn.Module) -> Head | None:
    """None if the model's head was not found to be one, or must not be taken apart."""
    if not getattr(model, "head_apart", False):
        return None
    head, config = model.get_output_embeddings(), model.config.get_text_config()  # type: ignore[union-attr,operator]
    return Head(head.weight, getattr(config, _SOFT_CAP, None))


@contextmanager
def headless(model: nn.Module) -> Iterator[None]:
    """Inside, a forward gives the last hidden states in the place of logits."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()  # type: ignore[union-attr,operator]
    cap = getattr(config, _SOFT_CAP, None)
    head.forward = lambda states: states
    if cap is not None:
        setattr(config, _SOFT_CAP, None)
    try:
        yield
    finally:
        del head.forward
        if cap is not None:
            setattr(config, _SOFT_CAP, cap)


@torch.no_grad()
def part_head_if_equal(model: nn.Module, padded_logits: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> None:
    """Let the head be taken apart if states @ weight says what the model says: the model itself is asked.

    What some scale the logits by is in the states then.
    On a CPU a 16-bit model keeps its head: products in float32, which tiles are made of, are far slower there.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear) or head.bias is not None or len(head.weight) < LEAST_VOCABULARY:
        return
    if head.weight.device.type == "cpu" and head.weight.dtype.itemsize < 4:
        return
    batch = probe(model)
    expected = padded_logits(model, batch)
    with headless(model):
        states = padded_logits(model, batch)
    cap = getattr(model.config.get_text_config(), _SOFT_CAP, None)
    logits = states @ head.weight.T
    capped = logits if cap is None else torch.tanh(logits / cap) * cap
    model.head_apart = torch.allclose(capped, expected, rtol=1e-5, atol=1e-5)
