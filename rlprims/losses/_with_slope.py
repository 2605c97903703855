"""Losses that say their own slope, so that forward needs one sweep and backward one product."""

from collections.abc import Callable
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlprims.first_order import first_order
from rlprims.masking import as_bytes, empty_like, row_blocks, sign_zero_outside, upcast, write_zero_outside
from rlprims.ratios import LOG_RATIO_LIMIT
from rlprims.types import PerToken, TokenMask

Rule: TypeAlias = Callable[..., tuple[PerToken, Tensor]]


def with_slope(
    rule: Rule,
    response_mask: TokenMask,
    log_probs: PerToken,
    *constants: Tensor,
    whole: Rule | None = None,
) -> PerToken:
    """Per-token losses and their derivatives in log_probs, both by ``rule(log_probs, *constants)``; 0 outside the mask.

    Derivatives that are bool say where the loss is its own, as that of any multiple of a ratio is; elsewhere it is 0.

    The rule sees blocks of rows (or of packed tokens) and may write to what it makes, for nothing records it. It need
    not look at the mask. Of the full size there are the losses and, if log_probs ask for a gradient, the derivatives:
    the losses are then also read in backward, and must not be changed in place. The gradient is first order.

    ``whole``, a kernel's rule, is called once instead: also with the mask and the dtype of the losses, which it obeys.

    >>> x = torch.tensor([3.0], requires_grad=True)
    >>> torch.autograd.grad(with_slope(lambda x: (x.square(), 2 * x), torch.tensor([True]), x), x)
    (tensor([6.]),)
    """
    losses: PerToken = _WithSlope.apply(  # type: ignore[no-untyped-call]
        rule, whole, response_mask, log_probs, *constants
    )
    return losses


def limited_log_ratio(log_probs: PerToken, old_log_probs: PerToken) -> tuple[PerToken, PerToken]:
    """For a rule: log_probs − old_log_probs clamped to ±20; and 1.0 where the clamp lets it move, else 0.0."""
    now, then = upcast(log_probs), upcast(old_log_probs)
    moved = torch.sub(now, then, out=empty_like(now, torch.promote_types(now.dtype, then.dtype)))
    near = torch.clamp(moved, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT, out=empty_like(moved, moved.dtype))
    return near, moved.eq_(near)  # in place: comparisons to bool take torch five times as long


def minus_weighted(log_probs: PerToken, weights: PerToken, response_mask: TokenMask) -> PerToken:
    """−weights · log_probs per token, the weights a constant; 0 outside the mask."""
    return with_slope(_minus_product, response_mask, log_probs, weights)


def _minus_product(log_probs: PerToken, weights: PerToken) -> tuple[PerToken, PerToken]:
    slope = upcast(weights).neg()
    return slope * log_probs, slope


class _WithSlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:  # with named ones dynamo may take ctx for one, by their number
        rule, whole, mask, *tensors = arguments
        dtype = reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
        losses: Tensor
        slopes: Tensor | None = None
        if whole is not None:
            losses, slopes = whole(*tensors, mask, dtype)
        else:
            losses = empty_like(tensors[0], dtype)
            for rows in row_blocks(losses):
                loss, slope = rule(*(x[rows] for x in tensors))
                pairs = [(loss, losses[rows])]
                if torch.compiler.is_compiling() and slope.dtype is torch.bool:
                    slope = slope * loss  # then the losses need not be written; and bools cost a compiler more
                if ctx.needs_input_grad[3]:
                    slopes = empty_like(losses, slope.dtype) if slopes is None else slopes
                    if slope.dtype is torch.bool:
                        slopes[rows] = slope
                    else:
                        pairs.append((slope, slopes[rows]))
                write_zero_outside(mask[rows], *pairs)
        if slopes is not None:
            ctx.save_for_backward(slopes, losses if slopes.dtype is torch.bool else None)
            if not torch.compiler.is_compiling():
                sign_zero_outside(ctx, mask)
        return losses

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slopes, losses = ctx.saved_tensors
        gradient = empty_like(slopes, grad.dtype)
        for rows in row_blocks(gradient):
            if losses is None:
                torch.mul(slopes[rows], grad[rows], out=gradient[rows])
            else:
                gradient[rows].copy_(as_bytes(slopes[rows])).mul_(losses[rows]).mul_(grad[rows])
        return (None, None, None, gradient, *(None for _ in ctx.needs_input_grad[4:]))
