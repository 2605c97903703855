"""Logits that are there to log-probs and entropies, with one gradient for both."""

from typing import Any

import torch
from torch import Tensor

from rlprims.first_order import first_order
from rlprims.masking import empty_like, upcast
from rlprims.softmax import check_logits, write_scores, write_slopes


def scores(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    *,
    with_entropies: bool = False,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs like ``token_ids``, and entropies of the rows, empty unless asked for."""
    check_logits(logits, temperature)
    leading = logits.shape[:-1]
    if leading not in (token_ids.shape, token_ids.shape[:-1]) or token_ids.dtype is not torch.int64:
        raise ValueError(
            f"token_ids has shape {tuple(token_ids.shape)} and dtype {token_ids.dtype}, "
            f"needs int64 {tuple(leading)}, one token for each row of logits, or {(*leading, 'K')}"
        )
    if inplace_backward and logits.is_leaf and logits.requires_grad:
        raise ValueError("inplace_backward=True would overwrite logits, which is a leaf: it needs a model's output")
    rows, each = leading.numel(), token_ids.shape[-1] if token_ids.dim() == logits.dim() else 1
    log_probs, entropies = _Scores.apply(
        logits.reshape(rows, logits.shape[-1]),
        token_ids.reshape(rows, each),
        temperature,
        with_entropies,
        inplace_backward,
    )
    return log_probs.reshape(token_ids.shape), entropies.reshape(leading) if with_entropies else entropies


class _Scores(torch.autograd.Function):
    """Keeps the logits and the entropies for backward: each block's softmax is made again, not stored."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float, with_entropies: bool, inplace_backward: bool
    ) -> tuple[Tensor, Tensor]:
        log_probs = upcast(logits.new_empty(token_ids.shape))
        entropies = log_probs.new_empty(len(logits) if with_entropies else 0)
        write_scores(logits, token_ids, temperature, log_probs, entropies if with_entropies else None)
        ctx.save_for_backward(logits, token_ids, entropies)
        ctx.temperature, ctx.with_entropies, ctx.inplace = temperature, with_entropies, inplace_backward
        ctx.set_materialize_grads(False)  # entropies that no loss reads cost nothing
        return log_probs, entropies

    @staticmethod
    @first_order
    def backward(ctx: Any, of_log_probs: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, token_ids, entropies = ctx.saved_tensors
        # Detached, it still counts as the same memory: torch refuses another function's backward that has saved it.
        slopes = logits.detach() if ctx.inplace else empty_like(logits, logits.dtype)
        if of_log_probs is None:
            of_log_probs = entropies.new_zeros(token_ids.shape)
        if not ctx.with_entropies:  # a compiler materializes them all the same
            of_entropies = None
        write_slopes(slopes, logits, token_ids, ctx.temperature, of_log_probs, of_entropies, entropies)
        return slopes, None, None, None, None
