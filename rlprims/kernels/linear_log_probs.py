"""Log-probs, a loss or a divergence, from hidden states and LM heads, one tile of tokens at a time.

All tiles use the same buffer. Backward computes the logits again and overwrites them with their gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlprims.kernels import ACCELERATED, without_autocast
from rlprims.kernels.log_probs import differentiable_gradients, kept_of, row_blocks, weighted_sum, write_gradient
from rlprims.types import SamplingSupport

_CPU_ELEMENTS, _GPU_ELEMENTS = 2**24, 2**28
"""Elements of one tile. On a CPU a product runs at full speed from 64 MiB of float32; a GPU needs about 1,000 rows."""

_CAST_ELEMENTS = 2**20
"""Elements of the head's weight that are cast at a time."""

Total = Callable[[Tensor, slice], Tensor]
"""From the logits of some tokens to the scalar that is differentiated: a sum over these tokens."""


def linear_log_probs(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    temperature: float,
    soft_cap: float | None,
    kept: SamplingSupport | None = None,
    vocab: None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, in the shape of ``token_ids``."""
    states, ids = hidden.reshape(-1, hidden.shape[-1]), token_ids.reshape(-1)
    options: dict[str, Any] = {"token_ids": ids, "temperature": temperature, "soft_cap": soft_cap, "kept": kept}
    formula = partial(ACCELERATED["linear_log_probs"].formula, **options)

    def begin(needed: Sequence[bool]) -> Callable[..., Any]:
        return _scorer(states, **options, with_entropies=needed[1])

    log_probs, entropies = (x.reshape(token_ids.shape) for x in _Linear.apply(states, head_weight, begin, formula))
    return log_probs, entropies


def linear_divergence(
    hidden: Tensor, head_weight: Tensor, teacher: tuple[Tensor, Tensor], mask: Tensor, measure: Any, vocab: None = None
) -> tuple[Tensor]:
    """The divergence of each token. The heads are not applied to tokens outside the mask."""
    valid = mask.flatten().nonzero()[:, 0]
    states, teacher_states = (x.flatten(0, -2)[valid] for x in (hidden, teacher[0]))
    finite = states.isfinite().all(-1) & teacher_states.isfinite().all(-1)

    def begin(_: Sequence[bool]) -> Callable[..., Any]:
        tiles, tile, beside = _tiles(teacher_states, teacher[1]), slice(0), states

        def score(logits: Tensor, tokens: slice) -> tuple[Tensor]:  # in the order of the tiles, which are as large
            nonlocal tile, beside
            if tokens.start >= tile.stop:
                tile, _, beside = next(tiles)
            values = measure(logits, beside[tokens.start - tile.start : tokens.stop - tile.start])
            return (torch.where(finite[tokens], values, torch.nan),)

        return score

    named = {"teacher": (teacher_states, teacher[1]), "mask": mask.flatten()[valid], "measure": measure}
    formula = partial(ACCELERATED["linear_divergence"].formula, **named)
    (values,) = _Linear.apply(states, head_weight, begin, formula)
    return (values.new_zeros(mask.numel()).index_put((valid,), values).reshape(mask.shape),)


class _Linear(torch.autograd.Function):
    """Numbers of each token from its logits: ``begin(needed)(logits, tokens)``. Backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, begin: Callable[..., Any], formula: Callable[..., Any]
    ) -> tuple[Tensor, ...]:
        score, outputs = begin((True, True)), list[Tensor]()
        for logits, tokens in _logits_in_blocks(hidden, head_weight):
            numbers = score(logits, tokens)
            outputs = outputs or [x.new_empty(hidden.shape[0]) for x in numbers]  # see _LinearTokenLoss
            for x, of_tokens in zip(outputs, numbers, strict=True):
                x[tokens] = of_tokens
        ctx.save_for_backward(hidden, head_weight)
        ctx.begin, ctx.formula = begin, formula
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(x is None for x in weights):
            return None, None, None, None
        hidden, head_weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            hidden, head_weight = _aliases(hidden, head_weight)
            outputs = ctx.formula(hidden, head_weight)
            return *_if_needed(outputs, weights, (hidden, head_weight), ctx.needs_input_grad), None, None
        score = ctx.begin([x is not None for x in weights])

        def total(logits: Tensor, tokens: slice) -> Tensor:
            return weighted_sum(score(logits, tokens), weights, tokens)

        return *_gradients(total, hidden, head_weight, ctx.needs_input_grad), None, None


def linear_token_loss(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    weights: Tensor,
    mask: Tensor,
    total_loss: Callable[..., Tensor],
    temperature: float,
    soft_cap: float | None,
    kept: SamplingSupport | None = None,
    vocab: None = None,
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
    """Computes the gradients in forward, while each tile's logits are in memory, and returns them in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        token_ids: Tensor,
        total: Total,
        temperature: float,
        soft_cap: float | None,
        kept: SamplingSupport | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        score = _scorer(hidden, token_ids, temperature, soft_cap, kept)
        count, dtype = hidden.shape[0], torch.promote_types(head_weight.dtype, torch.float32)
        # Allocated before the first tile. A small tensor kept from each tile would occupy freed memory of a large one,
        # the next tile could not reuse it, and memory would grow as if the logits were whole.
        losses, log_probs, entropies = (hidden.new_zeros(max(1, count), dtype=dtype) for _ in range(3))

        def total_of_logits(logits: Tensor, tokens: slice) -> Tensor:
            token_log_probs, token_entropies = score(logits, tokens)
            loss = total(token_log_probs, tokens)
            with torch.no_grad():
                losses[tokens.start] = loss
                log_probs[tokens], entropies[tokens] = token_log_probs, token_entropies
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
            freed = "its gradients are freed afterwards; call fused_loss again"
            raise RuntimeError(f"backward of fused_loss ran twice, expected once: {freed}")
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if x is None else x.mul_(grad) for x in gradients), *[None] * 5


def _scorer(
    hidden: Tensor,
    token_ids: Tensor,
    temperature: float,
    soft_cap: float | None,
    kept: SamplingSupport | None,
    *,
    with_entropies: bool = True,
) -> Callable[[Tensor, slice], tuple[Tensor, Any]]:
    """A function from logits of some tokens to their log-probs and entropies; NaN if a hidden state is not finite."""
    finite = hidden.isfinite().all(-1)
    formula = ACCELERATED["log_probs_and_entropies"].formula

    def score(logits: Tensor, tokens: slice) -> tuple[Tensor, Tensor | None]:
        ids = token_ids[tokens, None]
        log_probs, entropies = formula(logits, ids, temperature, soft_cap, with_entropies, kept=kept_of(tokens, kept))
        log_probs = torch.where(finite[tokens], log_probs[:, 0], torch.nan)
        return log_probs, None if entropies is None else torch.where(finite[tokens], entropies, torch.nan)

    return score


def _logits_in_blocks(hidden: Tensor, head_weight: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Blocks of logits that fit a cache, each with its tokens."""
    for tokens, _, logits in _tiles(hidden, head_weight):
        for rows in row_blocks(logits):
            yield logits[rows], _within(tokens, rows)


def _gradients(
    total: Total, hidden: Tensor, head_weight: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden and head_weight, in their dtypes. The second is summed in float32 or float64."""
    precision = torch.promote_types(head_weight.dtype, torch.float32)
    hidden_grad = torch.empty_like(hidden) if needs[0] else None
    weight_grad = torch.zeros_like(head_weight, dtype=precision) if needs[1] else None
    for tokens, states, logits in _tiles(hidden, head_weight):

        def total_of_rows(block: Tensor, rows: slice, tokens: slice = tokens) -> Tensor:
            return total(block, _within(tokens, rows))

        write_gradient(total_of_rows, logits, logits)  # from here on the buffer holds the gradient
        logits_grad, scale = _narrow(logits, head_weight.dtype)
        with without_autocast(hidden):
            if hidden_grad is not None:
                hidden_grad[tokens] = (logits_grad @ head_weight) * scale
            if weight_grad is not None:
                _add_product(weight_grad, logits_grad, (states * scale).to(hidden.dtype))
    return hidden_grad, None if weight_grad is None else weight_grad.to(head_weight.dtype)


def _if_needed(
    outputs: Sequence[Tensor], weights: Sequence[Tensor | None], inputs: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The differentiable gradient of each input that needs one; None for the others."""
    needed = [x for x, need in zip(inputs, needs, strict=False) if need]
    gradients = iter(differentiable_gradients(outputs, weights, needed))
    return [next(gradients) if need else None for need in needs[: len(inputs)]]


def _aliases(*inputs: Tensor) -> Iterator[Tensor]:
    """Views of the same tensors. Each is a new node of the graph, so that each gradient is a partial derivative."""
    return (x.view_as(x) for x in inputs)


def _tiles(hidden: Tensor, head_weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each tile: its tokens, their hidden states (0 if one is not finite), and their logits in a shared buffer."""
    elements = _CPU_ELEMENTS if hidden.device.type == "cpu" else _GPU_ELEMENTS
    count, vocabulary = hidden.shape[0], head_weight.shape[0]
    rows = max(1, min(count, elements // max(1, vocabulary)))
    buffer = head_weight.new_empty(rows, vocabulary, dtype=torch.promote_types(head_weight.dtype, torch.float32))
    finite = hidden.isfinite().all(-1, keepdim=True)
    for start in range(0, max(1, count), rows):
        tokens = slice(start, min(start + rows, count))
        states = torch.where(finite[tokens], hidden[tokens], 0.0)
        logits = buffer[: states.shape[0]]
        with without_autocast(hidden):
            _write_logits(logits, states, head_weight)
        yield tokens, states, logits


def _write_logits(logits: Tensor, states: Tensor, head_weight: Tensor) -> None:
    """Write states (n, H) @ head_weightᵀ in float32 or float64, without a cast copy of the whole head."""
    if logits.dtype is head_weight.dtype:
        torch.mm(states, head_weight.T, out=logits)
    elif states.is_cuda and "dtype_out" in torch.ops.aten.mm.overloads():  # from torch 2.8 on
        torch.mm(states, head_weight.T, out_dtype=logits.dtype, out=logits)
    else:
        for columns in _vocabulary_slices(head_weight):
            torch.mm(states.to(logits.dtype), head_weight[columns].to(logits.dtype).T, out=logits[:, columns])


def _narrow(logits_grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | float]:
    """The gradient in the head's dtype, and a scale for each row, so that 16 bits do not lose small entries."""
    if logits_grad.dtype is dtype:
        return logits_grad, 1.0
    scale = logits_grad.abs().amax(-1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    return logits_grad.div_(scale).to(dtype), scale


def _add_product(weight_grad: Tensor, logits_grad: Tensor, states: Tensor) -> None:
    """weight_grad += logits_gradᵀ @ states."""
    if weight_grad.dtype is logits_grad.dtype:
        weight_grad.addmm_(logits_grad.T, states)
    elif states.is_cuda and "dtype_out" in torch.ops.aten.addmm.overloads():
        torch.addmm(weight_grad, logits_grad.T, states, out_dtype=weight_grad.dtype, out=weight_grad)
    else:
        for columns in _vocabulary_slices(weight_grad):
            weight_grad[columns] += logits_grad[:, columns].T @ states


def _vocabulary_slices(head_weight: Tensor) -> Iterator[slice]:
    rows = max(1, _CAST_ELEMENTS // max(1, head_weight.shape[1]))
    return (slice(start, start + rows) for start in range(0, head_weight.shape[0], rows))


def _within(tokens: slice, rows: slice) -> slice:
    """The tokens of the batch that are these rows of a tile."""
    return slice(tokens.start + rows.start, min(tokens.start + rows.stop, tokens.stop))
