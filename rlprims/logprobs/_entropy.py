"""See :func:`entropy_from_logits`."""

from typing import Any

import torch
from torch import Tensor

from rlprims.first_order import first_order
from rlprims.masking import upcast
from rlprims.softmax import check_logits, row_blocks, softmax_and_log
from rlprims.types import PerToken


def _surprise(log_p: Tensor) -> Tensor:
    """−log p where p > 0, else 0: a banned token adds 0 · ∞ = 0 to the entropy."""
    return torch.where(log_p == -torch.inf, 0.0, -log_p)


class _Entropy(torch.autograd.Function):
    """Keeps the logits alone for backward: each block's softmax is made again, not stored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        entropy = upcast(logits.new_empty(len(logits)))
        for rows in row_blocks(logits):
            p, log_p = softmax_and_log(logits[rows], temperature)
            entropy[rows] = (p * _surprise(log_p)).sum(-1)
        ctx.save_for_backward(logits, entropy)
        ctx.temperature = temperature
        return entropy

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, entropy = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in row_blocks(logits):
            # d H / d z_j = p_j (−log p_j − H) / temperature
            g = grad[rows, None] / ctx.temperature
            p, log_p = softmax_and_log(logits[rows], ctx.temperature)
            block = p * (_surprise(log_p) - entropy[rows, None]) * g
            grad_logits[rows] = torch.where(g == 0, 0.0, block).to(logits.dtype)
        return grad_logits, None


def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0) -> PerToken:
    """Entropy of softmax(logits / temperature): H = −Σ_j p_j log p_j, with 0 log 0 = 0.

    Computed in row blocks and in float32 whatever the logits' dtype; the gradient is first order.

    Args:
        logits: float (..., V); −inf bans a token.
        temperature: above 0.

    Returns:
        float32 (or float64 if given) in nats, (...), between 0 and log V.

    Raises:
        ValueError: shapes or dtypes that do not fit; temperature <= 0.

    >>> entropy_from_logits(torch.tensor([[0.0, 0.0, -torch.inf]]))
    tensor([0.6931])
    """
    check_logits(logits, temperature)
    entropy: Tensor = _Entropy.apply(logits.reshape(-1, logits.shape[-1]), temperature)
    return entropy.reshape(logits.shape[:-1])
