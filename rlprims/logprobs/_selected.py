"""See :func:`from_logits`."""

from typing import Annotated, Any

import torch
from torch import Tensor

from rlprims.first_order import first_order
from rlprims.masking import upcast
from rlprims.softmax import check_logits, log_softmax, row_blocks, softmax


class _Selected(torch.autograd.Function):
    """Keeps the logits alone for backward: each block's softmax is made again, not stored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float, inplace_backward: bool) -> Tensor:
        ctx.save_for_backward(logits, token_ids)
        ctx.temperature, ctx.inplace = temperature, inplace_backward
        selected = upcast(logits.new_empty(token_ids.shape))
        for rows in row_blocks(logits):
            selected[rows] = log_softmax(logits[rows], temperature).gather(1, token_ids[rows])
        return selected

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, token_ids = ctx.saved_tensors
        # Detached, it still counts as the same memory: torch refuses another function's backward that has saved it.
        grad_logits = logits.detach() if ctx.inplace else torch.empty_like(logits)
        for rows in row_blocks(logits):
            # d log p_a / d z_j = (1[j = a] − p_j) / temperature
            g = grad[rows] / ctx.temperature
            block = -softmax(logits[rows], ctx.temperature) * g.sum(1, keepdim=True)
            block.scatter_add_(1, token_ids[rows], g)
            # A row that no loss reads gets exactly 0, whatever stands in it.
            grad_logits[rows] = torch.where((g == 0).all(1, keepdim=True), 0.0, block).to(logits.dtype)
        return grad_logits, None, None, None


def from_logits(
    logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0, inplace_backward: bool = False
) -> Annotated[Tensor, "float, like token_ids"]:
    """Log-probability of the given tokens: log softmax(logits / temperature)[token].

    Computed in row blocks and in float32 whatever the logits' dtype; the gradient is first order. Banned tokens (logit
    −inf) are legal. Divide by the temperature that the sampler used, or the ratio to its log-probs is not 1 on policy.

    Args:
        logits: float (..., V).
        token_ids: int64 (...), in [0, V); or (..., K), then K tokens of each row, as ``losses.topk_kl`` reads.
        temperature: above 0.
        inplace_backward: the gradient overwrites the logits, and no second (..., V) is made. They must not be read
            after backward; where another function's backward would, torch raises.

    Returns:
        float32 (or float64 if given) in nats, like token_ids.

    Raises:
        ValueError: shapes or dtypes that do not fit; temperature <= 0; inplace_backward of a leaf.

    >>> from_logits(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([1]))
    tensor([-0.6931])
    """
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
    selected: Tensor = _Selected.apply(
        logits.reshape(rows, logits.shape[-1]), token_ids.reshape(rows, each), temperature, inplace_backward
    )
    return selected.reshape(token_ids.shape)
