"""Log-probs and entropies of logits that are there, in blocks of rows that fit a cache, and the gradient likewise.

A block is computed by the formula, and again in backward: nothing as large as the logits is made but their gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlprims.kernels import ACCELERATED
from rlprims.types import Kept

_CPU_ELEMENTS, _GPU_ELEMENTS = 2**18, 2**26
"""Elements of one block: in float32 1 MiB, which stays in a cache; on a GPU each costs a few launches."""


def log_probs_and_entropies(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    soft_cap: float | None = None,
    with_entropies: bool = True,
    overwrite: bool = False,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (..., K), and entropies (...) unless not asked for."""
    leading, each = logits.shape[:-1], token_ids.shape[-1]
    rows = leading.numel()
    log_probs, entropies = _LogProbsAndEntropies.apply(
        logits.reshape(rows, logits.shape[-1]),
        token_ids.reshape(rows, each),
        (temperature, soft_cap, with_entropies),
        overwrite,
        kept,
    )
    return log_probs.reshape(token_ids.shape), entropies.reshape(leading) if with_entropies else None


class _LogProbsAndEntropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, options: tuple[Any, ...], overwrite: bool, kept: Kept | None
    ) -> tuple[Tensor, Tensor | None]:
        formula = ACCELERATED["log_probs_and_entropies"].formula
        parts = [
            formula(logits[rows], token_ids[rows], *options, kept=kept_of(rows, kept)) for rows in row_blocks(logits)
        ]
        log_probs, entropies = zip(*parts, strict=True)
        ctx.save_for_backward(logits, token_ids)
        ctx.options, ctx.overwrite, ctx.kept = options, overwrite, kept
        ctx.set_materialize_grads(False)
        return torch.cat(log_probs), torch.cat(entropies) if options[-1] else None

    @staticmethod
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_log_probs is None and of_entropies is None:
            return None, None, None, None, None
        logits, token_ids = ctx.saved_tensors
        formula, (temperature, soft_cap, _) = ACCELERATED["log_probs_and_entropies"].formula, ctx.options
        weights = of_log_probs, of_entropies
        if torch.is_grad_enabled():  # create_graph=True
            scores = formula(logits, token_ids, *ctx.options, kept=ctx.kept)
            return *differentiable_gradients(scores, weights, [logits]), None, None, None, None

        def total(block: Tensor, rows: slice) -> Tensor:
            wanted = of_entropies is not None
            scores = formula(block, token_ids[rows], temperature, soft_cap, wanted, kept=kept_of(rows, ctx.kept))
            return weighted_sum(scores, weights, rows)

        # Detached it still counts as the same memory: torch refuses the backward of others that have saved it.
        gradient = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        write_gradient(total, logits, gradient)
        return gradient, None, None, None, None


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Slices that cover the rows of (N, V) logits; at least one."""
    elements = _CPU_ELEMENTS if logits.device.type == "cpu" else _GPU_ELEMENTS
    rows = max(1, elements // max(1, logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, max(1, logits.shape[0]), rows))


def kept_of(rows: slice, kept: Kept | None) -> Kept | None:
    """The kept sets of some rows; their bounds are read on the host."""
    if kept is None:
        return None
    offsets = kept.offsets[rows.start : rows.stop + 1]
    return Kept(kept.ids[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])


def weighted_sum(outputs: Sequence[Tensor | None], weights: Sequence[Tensor | None], rows: slice) -> Tensor:
    """Σ output · weight: its gradient is the one that backward needs. None: no loss reads that output."""
    terms = [(x * w[rows]).sum() for x, w in zip(outputs, weights, strict=True) if x is not None and w is not None]
    return torch.stack(terms).sum()


def differentiable_gradients(
    outputs: Sequence[Tensor | None], weights: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The gradients of Σ output · weight, for ``create_graph=True``; the weights may depend on the inputs."""
    read = [(x, w) for x, w in zip(outputs, weights, strict=True) if x is not None and w is not None]
    outputs, weights = zip(*read, strict=True)
    return torch.autograd.grad(outputs, inputs, weights, create_graph=True)


def write_gradient(total: Callable[[Tensor, slice], Tensor], logits: Tensor, out: Tensor) -> None:
    """The gradient of ``total(block, rows)``, block by block, into ``out``, which may be the logits."""
    for rows in row_blocks(logits):
        with torch.enable_grad():
            block = logits[rows].detach().requires_grad_()
            (out[rows],) = torch.autograd.grad(total(block, rows), block)
