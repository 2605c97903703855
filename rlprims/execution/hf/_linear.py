"""A model's linear layers by :mod:`rlprims.products`, where that pays."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlprims import products


class WideLinear(nn.Linear):
    """An ``nn.Linear`` whose large products are oneDNN's."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if not products.suit(x, weight):
            return super().forward(x)
        if torch.is_grad_enabled():
            return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]
        return products.product(x, weight, bias)


def widen(model: nn.Module) -> None:
    """Make the model's linear layers wide where that pays; a subclass, which may compute something else, stays."""
    if next(model.parameters()).device.type == "cpu" and products.pays():
        for layer in model.modules():
            if type(layer) is nn.Linear:
                layer.__class__ = WideLinear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return products.product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = slope.flatten(0, -2)
        return (
            products.product(slope, weight.t()) if of_x else None,
            _of_weight(rows, x.flatten(0, -2)) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _of_weight(slope: Tensor, x: Tensor) -> Tensor:
    """slopeᵀ x. The left of a product is copied if it is transposed: here the narrower of the two."""
    if x.shape[1] < slope.shape[1]:
        return products.product(x.t(), slope.t()).t()
    return products.product(slope.t(), x.t())
