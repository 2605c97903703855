"""Gradients that are made by hand have no gradient of their own, and say so."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Gradients = TypeVar("Gradients")


def first_order(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """For the ``backward`` of a ``torch.autograd.Function``: refuses ``create_graph=True``.

    Torch would take its answer for a constant (its own ``once_differentiable`` does, if nothing before it asks for a
    gradient), so that second derivatives, as of a gradient penalty, would lack these terms in silence.
    """

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Gradients:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("create_graph=True: this gradient is made by hand and has no gradient of its own")
        return backward(ctx, *gradients)

    return refusing
