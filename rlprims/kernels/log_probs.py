"""Log-probs and entropies from logits, and their gradient, in blocks of rows that fit a cache.

The formula computes each block, and again in backward. The gradient is the only new tensor as large as the logits.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlprims.kernels import ACCELERATED
from rlprims.types import SamplingSupport

_CPU_ELEMENTS, _GPU_ELEMENTS = 2**18, 2**26
"""Elements of one block. On a CPU 1 MiB of float32 stays in a cache; a GPU needs few and large blocks."""


def log_probs_and_entropies(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    soft_cap: float | None = None,
    with_entropies: bool = True,
    overwrite: bool = False,
    kept: SamplingSupport | None = None,
    vocab: None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (..., K), and entropies (...), or None without ``with_entropies``."""
    leading, ids_per_row = logits.shape[:-1], token_ids.shape[-1]
    rows = leading.numel()
    flat = logits.reshape(rows, logits.shape[-1]), token_ids.reshape(rows, ids_per_row)
    options = (temperature, soft_cap, with_entropies)
    log_probs, entropies = _LogProbsAndEntropies.apply(*flat, options, overwrite, kept)
    return log_probs.reshape(token_ids.shape), entropies.reshape(leading) if with_entropies else None


class _LogProbsAndEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, options: tuple[Any, ...], overwrite: bool, kept: SamplingSupport | None
    ) -> tuple[Tensor, Tensor | None]:
        formula = ACCELERATED["log_probs_and_entropies"].formula
        blocks = row_blocks(logits)
        parts = [formula(logits[rows], ids[rows], *options, kept=kept_of(rows, kept)) for rows in blocks]
        log_probs, entropies = zip(*parts, strict=True)
        ctx.save_for_backward(logits, ids)
        ctx.options, ctx.overwrite, ctx.kept = options, overwrite, kept
        ctx.set_materialize_grads(False)
        return torch.cat(log_probs), torch.cat(entropies) if options[-1] else None

    @staticmethod
    def backward(ctx: Any, log_probs_grad: Tensor | None, entropies_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if log_probs_grad is None and entropies_grad is None:
            return None, None, None, None, None
        logits, token_ids = ctx.saved_tensors
        formula, (temperature, soft_cap, _) = ACCELERATED["log_probs_and_entropies"].formula, ctx.options
        weights = log_probs_grad, entropies_grad
        if torch.is_grad_enabled():  # create_graph=True
            scores = formula(logits, token_ids, *ctx.options, kept=ctx.kept)
            return *differentiable_gradients(scores, weights, [logits]), None, None, None, None

        def total(block: Tensor, rows: slice) -> Tensor:
            with_entropies = entropies_grad is not None
            kept = kept_of(rows, ctx.kept)
            scores = formula(block, token_ids[rows], temperature, soft_cap, with_entropies, kept=kept)
            return weighted_sum(scores, weights, rows)

        # detach() shares the version counter: if another node saved the logits, its backward raises an error.
        gradient = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        write_gradient(total, logits, gradient)
        return gradient, None, None, None, None


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Slices that cover the rows of (N, V) logits; at least one slice."""
    elements = _CPU_ELEMENTS if logits.device.type == "cpu" else _GPU_ELEMENTS
    rows = max(1, elements // max(1, logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, max(1, logits.shape[0]), rows))


def kept_of(rows: slice, kept: SamplingSupport | None) -> SamplingSupport | None:
    """The kept sets of some rows; their bounds are read on the host."""
    if kept is None:
        return None
    offsets = kept.offsets[rows.start : rows.stop + 1]
    return SamplingSupport(kept.ids[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])


def weighted_sum(outputs: Sequence[Tensor | None], weights: Sequence[Tensor | None], rows: slice) -> Tensor:
    """Σ output · weight, whose gradient is the vector-Jacobian product. A weight of None: no loss uses that output."""
    terms = [(x * w[rows]).sum() for x, w in zip(outputs, weights, strict=True) if x is not None and w is not None]
    return torch.stack(terms).sum()


def differentiable_gradients(
    outputs: Sequence[Tensor | None], weights: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of Σ output · weight, for ``create_graph=True``; the weights may depend on the inputs."""
    used = [(x, w) for x, w in zip(outputs, weights, strict=True) if x is not None and w is not None]
    outputs, weights = zip(*used, strict=True)
    return torch.autograd.grad(outputs, inputs, weights, create_graph=True)


def write_gradient(total: Callable[[Tensor, slice], Tensor], logits: Tensor, out: Tensor) -> None:
    """Write the gradient of ``total(block, rows)`` block by block into ``out``, which may be the logits' memory."""
    for rows in row_blocks(logits):
        with torch.enable_grad():
            block = logits[rows].detach().requires_grad_()
            (out[rows],) = torch.autograd.grad(total(block, rows), block)
