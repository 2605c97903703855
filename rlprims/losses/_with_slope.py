"""Losses that say their own slope, so that forward needs one sweep and backward one product."""

from collections.abc import Callable
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlprims.masking import row_blocks
from rlprims.types import PerToken

Rule: TypeAlias = Callable[..., tuple[PerToken, PerToken]]


def with_slope(rule: Rule, log_probs: PerToken, *constants: Tensor) -> PerToken:
    """Per-token losses from ``rule(log_probs, *constants)``, which returns them and their derivatives in log_probs.

    The rule sees blocks of rows (or of packed tokens) and may write to what it makes, for nothing records it: of the
    full size there are the losses and, if log_probs ask for a gradient, the slopes. The gradient is first order.

    >>> x = torch.tensor([3.0], requires_grad=True)
    >>> torch.autograd.grad(with_slope(lambda x: (x.square(), 2 * x), x), x)
    (tensor([6.]),)
    """
    losses: PerToken = _WithSlope.apply(rule, log_probs, *constants)  # type: ignore[no-untyped-call]
    return losses


class _WithSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, log_probs: Tensor, *constants: Tensor) -> Tensor:
        tensors = (log_probs, *constants)
        dtype = reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
        losses = torch.empty_like(log_probs, dtype=dtype)
        slopes = torch.empty_like(losses) if ctx.needs_input_grad[1] else None
        for rows in row_blocks(log_probs):
            losses[rows], slope = rule(*(x[rows] for x in tensors))
            if slopes is not None:
                slopes[rows] = slope
        ctx.save_for_backward(slopes)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # torch would take the slopes for constants
            raise RuntimeError("create_graph=True: the gradient of this loss has no gradient of its own")
        (slope,) = ctx.saved_tensors
        return (None, grad * slope, *(None for _ in ctx.needs_input_grad[2:]))
