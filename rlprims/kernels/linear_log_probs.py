"""Log-probs, or a loss, from hidden states and the LM head, a tile of tokens at a time: the logits are never whole.

Each tile's logits stand in the same memory, and are made again in backward, where their gradient takes their place. The
vocabulary is whole in each tile, so that a gradient of the hidden states is rounded once.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlprims.kernels import ACCELERATED, without_autocast
from rlprims.kernels.log_probs import differentiable_gradients, kept_of, row_blocks, weighted_sum, write_gradient
from rlprims.types import Kept

_CPU_ELEMENTS, _GPU_ELEMENTS = 2**24, 2**28
"""Elements of one tile: 64 MiB of float32 are enough for a full-speed product on a CPU; a GPU needs a thousand rows."""

_CAST_ELEMENTS = 2**20
"""Elements of the head's weight that are cast at a time."""

Total = Callable[[Tensor, slice], Tensor]
"""From the logits of some tokens to what is differentiated: a sum over these tokens."""


def linear_log_probs(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    temperature: float,
    soft_cap: float | None,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, like ``token_ids``."""
    states = hidden.reshape(-1, hidden.shape[-1])
    scores = _LinearLogProbs.apply(states, head_weight, token_ids.reshape(-1), temperature, soft_cap, kept)
    log_probs, entropies = (x.reshape(token_ids.shape) for x in scores)
    return log_probs, entropies


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        token_ids: Tensor,
        temperature: float,
        soft_cap: float | None,
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor]:
        score = _scorer(hidden, token_ids, temperature, soft_cap, kept)
        parts = [score(logits, tokens) for logits, tokens in _logits_in_blocks(hidden, head_weight)]
        log_probs, entropies = (torch.cat(x) for x in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, head_weight, token_ids)
        ctx.options = temperature, soft_cap, kept
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        if of_log_probs is None and of_entropies is None:
            return None, None, None, None, None, None
        hidden, head_weight, token_ids = ctx.saved_tensors
        weights = of_log_probs, of_entropies
        if torch.is_grad_enabled():  # create_graph=True
            hidden, head_weight = _aliases(hidden, head_weight)
            scores = ACCELERATED["linear_log_probs"].formula(hidden, head_weight, token_ids, *ctx.options)
            return *_if_needed(scores, weights, (hidden, head_weight), ctx.needs_input_grad), None, None, None, None
        score = _scorer(hidden, token_ids, *ctx.options, with_entropies=of_entropies is not None)

        def total(logits: Tensor, tokens: slice) -> Tensor:
            return weighted_sum(score(logits, tokens), weights, tokens)

        return *_gradients(total, hidden, head_weight, ctx.needs_input_grad), None, None, None, None


def linear_token_loss(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    weights: Tensor,
    mask: Tensor,
    total_loss: Callable[..., Tensor],
    temperature: float,
    soft_cap: float | None,
    kept: Kept | None = None,
    /,
    **data: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, log-probs and entropies; the head is not applied to tokens outside the mask."""
    valid = mask.nonzero()[:, 0]
    weights, ids = weights[valid], token_ids[valid]
    kept = None if kept is None else kept.take(valid)
    data = {name: x[valid] for name, x in data.items()}

    def total(log_probs: Tensor, tokens: slice) -> Tensor:
        part = {name: x[tokens] for name, x in data.items()}
        return total_loss(log_probs, weights[tokens], torch.ones_like(ids[tokens], dtype=torch.bool), **part)

    if not torch.is_grad_enabled():
        hidden, head_weight = hidden.detach(), head_weight.detach()
    loss, *scores = _LinearTokenLoss.apply(hidden[valid], head_weight, ids, total, temperature, soft_cap, kept)
    log_probs, entropies = (x.new_zeros(mask.shape).index_put((valid,), x) for x in scores)
    return loss, log_probs, entropies


class _LinearTokenLoss(torch.autograd.Function):
    """The gradients are made in forward, while each tile's logits are there, and returned in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        token_ids: Tensor,
        total: Total,
        temperature: float,
        soft_cap: float | None,
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        score = _scorer(hidden, token_ids, temperature, soft_cap, kept)
        count, dtype = hidden.shape[0], torch.promote_types(head_weight.dtype, torch.float32)
        # Made before the first tile: a small tensor that is kept from each tile would lie where the next one's large
        # ones were freed, so that they cannot, and memory would grow as if the logits were whole.
        losses, log_probs, entropies = (hidden.new_zeros(max(1, count), dtype=dtype) for _ in range(3))

        def total_of_logits(logits: Tensor, tokens: slice) -> Tensor:
            of_tokens, spread = score(logits, tokens)
            loss = total(of_tokens, tokens)
            with torch.no_grad():
                losses[tokens.start] = loss
                log_probs[tokens], entropies[tokens] = of_tokens, spread
            return loss

        if any(ctx.needs_input_grad):
            ctx.gradients = _gradients(total_of_logits, hidden, head_weight, ctx.needs_input_grad)
        else:
            for logits, tokens in _logits_in_blocks(hidden, head_weight):
                total_of_logits(logits, tokens)
        scores = log_probs[:count], entropies[:count]
        ctx.save_for_backward(hidden, head_weight, token_ids)
        ctx.total, ctx.options = total, (temperature, soft_cap, kept)
        ctx.mark_non_differentiable(*scores)
        return losses.sum(), *scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            hidden, head_weight, token_ids = ctx.saved_tensors
            hidden, head_weight = _aliases(hidden, head_weight)
            log_probs, _ = ACCELERATED["linear_log_probs"].formula(hidden, head_weight, token_ids, *ctx.options)
            total = ctx.total(log_probs, slice(None))
            return *_if_needed([total], [grad], (hidden, head_weight), ctx.needs_input_grad), *[None] * 5
        if ctx.gradients is None:
            raise RuntimeError(
                "backward of fused_loss runs once: its gradients are computed once. Call fused_loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if x is None else x.mul_(grad) for x in gradients), *[None] * 5


def _scorer(
    hidden: Tensor,
    token_ids: Tensor,
    temperature: float,
    soft_cap: float | None,
    kept: Kept | None,
    *,
    with_entropies: bool = True,
) -> Callable[[Tensor, slice], tuple[Tensor, Any]]:
    """From the logits of some tokens to their log-probs and entropies, by the formula; NaN where it says NaN."""
    finite = hidden.isfinite().all(-1)
    formula = ACCELERATED["log_probs_and_entropies"].formula

    def score(logits: Tensor, tokens: slice) -> tuple[Tensor, Tensor | None]:
        ids = token_ids[tokens, None]
        log_probs, entropies = formula(logits, ids, temperature, soft_cap, with_entropies, kept=kept_of(tokens, kept))
        log_probs = torch.where(finite[tokens], log_probs[:, 0], torch.nan)
        return log_probs, None if entropies is None else torch.where(finite[tokens], entropies, torch.nan)

    return score


def _logits_in_blocks(hidden: Tensor, head_weight: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Logits of a few tokens, which fit a cache, and which tokens they are."""
    for tokens, _, logits in _tiles(hidden, head_weight):
        for rows in row_blocks(logits):
            yield logits[rows], _within(tokens, rows)


def _gradients(
    total: Total, hidden: Tensor, head_weight: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Of hidden and head_weight, in their dtype; that of head_weight is summed in computing precision."""
    precision = torch.promote_types(head_weight.dtype, torch.float32)
    of_hidden = torch.empty_like(hidden) if needs[0] else None
    of_weight = torch.zeros_like(head_weight, dtype=precision) if needs[1] else None
    for tokens, states, slopes in _tiles(hidden, head_weight):

        def total_of_rows(block: Tensor, rows: slice, tokens: slice = tokens) -> Tensor:
            return total(block, _within(tokens, rows))

        write_gradient(total_of_rows, slopes, slopes)
        slopes, scale = _narrow(slopes, head_weight.dtype)
        with without_autocast(hidden):
            if of_hidden is not None:
                of_hidden[tokens] = (slopes @ head_weight) * scale
            if of_weight is not None:
                _add_product(of_weight, slopes, (states * scale).to(hidden.dtype))
    return of_hidden, None if of_weight is None else of_weight.to(head_weight.dtype)


def _if_needed(
    outputs: Sequence[Tensor], weights: Sequence[Tensor | None], inputs: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The differentiable gradients of those inputs that need one."""
    wanted = [x for x, need in zip(inputs, needs, strict=False) if need]
    gradients = iter(differentiable_gradients(outputs, weights, wanted))
    return [next(gradients) if need else None for need in needs[: len(inputs)]]


def _aliases(*inputs: Tensor) -> Iterator[Tensor]:
    """The same tensors, none of which depends on another: each gradient is a partial one."""
    return (x.view_as(x) for x in inputs)


def _tiles(hidden: Tensor, head_weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Which tokens, their hidden states (0 where one is not finite), and their logits; the same memory for all."""
    elements = _CPU_ELEMENTS if hidden.device.type == "cpu" else _GPU_ELEMENTS
    count, vocabulary = hidden.shape[0], head_weight.shape[0]
    rows = max(1, min(count, elements // max(1, vocabulary)))
    memory = head_weight.new_empty(rows, vocabulary, dtype=torch.promote_types(head_weight.dtype, torch.float32))
    finite = hidden.isfinite().all(-1, keepdim=True)
    for start in range(0, max(1, count), rows):
        tokens = slice(start, min(start + rows, count))
        states = torch.where(finite[tokens], hidden[tokens], 0.0)
        logits = memory[: states.shape[0]]
        with without_autocast(hidden):
            _write_logits(logits, states, head_weight)
        yield tokens, states, logits


def _write_logits(logits: Tensor, states: Tensor, head_weight: Tensor) -> None:
    """states (n, H) @ head_weightᵀ in computing precision; a whole cast of the head is never made."""
    if logits.dtype is head_weight.dtype:
        torch.mm(states, head_weight.T, out=logits)
    elif states.is_cuda and "dtype_out" in torch.ops.aten.mm.overloads():  # from torch 2.8 on
        torch.mm(states, head_weight.T, out_dtype=logits.dtype, out=logits)
    else:
        for columns in _vocabulary_slices(head_weight):
            torch.mm(states.to(logits.dtype), head_weight[columns].to(logits.dtype).T, out=logits[:, columns])


def _narrow(slopes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | float]:
    """Slopes in the head's dtype, and a factor for each row, without which 16 bits would lose small ones."""
    if slopes.dtype is dtype:
        return slopes, 1.0
    scale = slopes.abs().amax(-1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    return slopes.div_(scale).to(dtype), scale


def _add_product(of_weight: Tensor, slopes: Tensor, states: Tensor) -> None:
    """of_weight += slopesᵀ @ states."""
    if of_weight.dtype is slopes.dtype:
        of_weight.addmm_(slopes.T, states)
    else:
        for columns in _vocabulary_slices(of_weight):
            of_weight[columns] += slopes[:, columns].T @ states


def _vocabulary_slices(head_weight: Tensor) -> Iterator[slice]:
    rows = max(1, _CAST_ELEMENTS // max(1, head_weight.shape[1]))
    return (slice(start, start + rows) for start in range(0, head_weight.shape[0], rows))


def _within(tokens: slice, rows: slice) -> slice:
    """The rows of a tile as tokens of the batch."""
    return slice(tokens.start + rows.start, min(tokens.start + rows.stop, tokens.stop))
