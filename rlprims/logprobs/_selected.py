"""See :func:`from_logits`."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlprims.masking import upcast
from rlprims.softmax import check_logits, log_softmax, row_blocks
from rlprims.types import PerToken


class _Selected(torch.autograd.Function):
    """Keeps the logits alone for backward: each block's softmax is made again, not stored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, token_ids)
        ctx.temperature = temperature
        selected = upcast(logits.new_empty(len(logits)))
        for rows in row_blocks(logits):
            selected[rows] = log_softmax(logits[rows], temperature).gather(1, token_ids[rows, None])[:, 0]
        return selected

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, token_ids = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in row_blocks(logits):
            # d log p_a / d z_j = (1[j = a] − p_j) / temperature
            g = grad[rows, None] / ctx.temperature
            block = -log_softmax(logits[rows], ctx.temperature).exp() * g
            block.scatter_add_(1, token_ids[rows, None], g)
            # A row that no loss reads gets exactly 0, whatever stands in it.
            grad_logits[rows] = torch.where(g == 0, 0.0, block).to(logits.dtype)
        return grad_logits, None, None


def from_logits(logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0) -> PerToken:
    """Log-probability of the given tokens: log softmax(logits / temperature)[token].

    Computed in row blocks and in float32 whatever the logits' dtype; the gradient is first order. Banned tokens (logit
    −inf) are legal. Divide by the temperature that the sampler used, or the ratio to its log-probs is not 1 on policy.

    Args:
        logits: float (..., V).
        token_ids: int64 (...), in [0, V).
        temperature: above 0.

    Returns:
        float32 (or float64 if given) in nats, (...).

    Raises:
        ValueError: shapes or dtypes that do not fit; temperature <= 0.

    >>> from_logits(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([1]))
    tensor([-0.6931])
    """
    check_logits(logits, temperature)
    if token_ids.shape != logits.shape[:-1] or token_ids.dtype is not torch.int64:
        raise ValueError(
            f"token_ids has shape {tuple(token_ids.shape)} and dtype {token_ids.dtype}, "
            f"needs int64 {tuple(logits.shape[:-1])}: one token for each row of logits"
        )
    selected: Tensor = _Selected.apply(logits.reshape(-1, logits.shape[-1]), token_ids.reshape(-1), temperature)
    return selected.reshape(token_ids.shape)
