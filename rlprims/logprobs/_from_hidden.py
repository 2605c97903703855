"""See :func:`from_hidden`."""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from rlprims.first_order import first_order
from rlprims.logprobs._head import (
    add_to_weight_,
    capped_parts,
    check_head,
    surprise_slopes,
    tiles,
    to_hidden,
    write_logits_,
)
from rlprims.masking import empty_like, upcast
from rlprims.softmax import write_scores, write_slopes
from rlprims.types import PerToken


class LogProbs(NamedTuple):
    """Of each token, its log-prob; and the entropy of the distribution it was drawn from."""

    log_probs: PerToken
    entropies: PerToken


def from_hidden(
    hidden: Annotated[Tensor, "float (..., H)"],
    head_weight: Annotated[Tensor, "float (V, H)"],
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
) -> LogProbs:
    """Log-prob and entropy of softmax(z / temperature) from hidden states and the LM head, z = hidden @ head_weightᵀ.

    The logits (N, V) are never there: a tile of tokens at a time, made again in backward. What is kept is the
    arguments. z is a float32 number whatever the dtype of the arguments, where peers round it to bf16; a gradient has
    the dtype of its argument, and that of head_weight is summed in float32. A head that needs no gradient (frozen, or
    only with adapters before it) costs no work for one, nor does an output that no loss reads. First order only.

    A head with a bias is one with another column: a hidden state of 1 whose weight is the bias. When the log-probs go
    into a token-wise loss at once, :func:`fused_loss` saves the second product with the head.

    Args:
        hidden: float (..., H), the last hidden states, of the positions that predict the tokens.
        head_weight: float (V, H), the weight of the head, in the dtype of hidden.
        token_ids: int64 (...), in [0, V).
        temperature: above 0.
        soft_cap: c > 0 for logits c · tanh(z / c), as in Gemma 2 (arXiv:2408.00118); None for z.

    Returns:
        log_probs, entropies: float32 (or float64 if given) in nats, (...).

    Raises:
        ValueError: shapes or dtypes that do not fit; temperature or soft_cap <= 0.

    >>> hidden, head = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0], [0.0, 1.0]])
    >>> from_hidden(hidden, head, torch.tensor([1]))
    LogProbs(log_probs=tensor([-0.6931]), entropies=tensor([0.6931]))
    """
    check_head(hidden, head_weight, token_ids, temperature, soft_cap)
    rows = hidden.reshape(-1, hidden.shape[-1])
    log_probs, entropies = _FromHidden.apply(rows, head_weight, token_ids.reshape(-1), temperature, soft_cap)
    return LogProbs(log_probs.reshape(token_ids.shape), entropies.reshape(token_ids.shape))


class _FromHidden(torch.autograd.Function):
    """Keeps its arguments for backward, and the entropies: each tile's logits are made again, not stored."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, token_ids: Tensor, temperature: float, soft_cap: float | None
    ) -> tuple[Tensor, Tensor]:
        log_probs = upcast(hidden.new_empty(len(hidden)))
        entropies = torch.empty_like(log_probs)
        for tokens, tile, _ in tiles(len(hidden), head_weight):
            write_logits_(tile, hidden[tokens], head_weight)
            for rows, part, _ in capped_parts(tile, soft_cap):
                ids = token_ids[tokens][rows, None]
                write_scores(part, ids, temperature, log_probs[tokens][rows, None], entropies[tokens][rows])
        ctx.save_for_backward(hidden, head_weight, token_ids, entropies)
        ctx.temperature, ctx.soft_cap = temperature, soft_cap
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @first_order
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, head_weight, token_ids, entropies = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = empty_like(head_weight, entropies.dtype).zero_() if needs_weight else None
        of_log_probs = torch.zeros_like(entropies) if grad_log_probs is None else grad_log_probs
        read = of_log_probs != 0 if grad_entropies is None else (of_log_probs != 0) | (grad_entropies != 0)
        for tokens, tile, slopes in tiles(len(hidden), head_weight, with_slopes=True):
            # A token that no loss reads gets exactly 0, whatever stands in its hidden state.
            states = torch.where(read[tokens, None], hidden[tokens], 0.0)
            write_logits_(tile, states, head_weight)
            scale: Tensor | float = 1.0
            if grad_entropies is None:
                surprise_slopes(tile, token_ids[tokens], ctx.temperature, ctx.soft_cap, slopes)
                scale = -of_log_probs[tokens, None] / ctx.temperature
            else:
                per_token = token_ids[:, None], of_log_probs[:, None], grad_entropies, entropies
                for rows, part, bend in capped_parts(tile, ctx.soft_cap):
                    ids, *of = (x[tokens][rows] for x in per_token)
                    of_part = slopes[rows] if bend is None else part
                    write_slopes(of_part, part, ids, ctx.temperature, *of)
                    if bend is not None:
                        slopes[rows] = part.mul_(bend)
            if grad_hidden is not None:
                grad_hidden[tokens] = to_hidden(slopes, head_weight) * scale
            if grad_weight is not None:
                add_to_weight_(grad_weight, slopes, (states * scale).to(hidden.dtype))
        return grad_hidden, None if grad_weight is None else grad_weight.to(head_weight.dtype), None, None, None
