"""Gradients that are made by hand: a second derivative is refused, never wrong."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlprims.logprobs import entropy_from_logits, from_hidden, from_logits

TOKENS = torch.tensor([[1, 2]])
HEAD = torch.tensor([[0.5, 0.1, -0.3], [-0.2, 0.4, 0.7], [0.3, -0.6, 0.2]])


@pytest.mark.parametrize(
    "measure",
    [
        lambda x: from_logits(x, TOKENS),
        lambda x: entropy_from_logits(x),
        lambda x: from_hidden(x, HEAD, TOKENS)[0],
    ],
    ids=["from_logits", "entropy_from_logits", "from_hidden"],
)
def test_a_gradient_penalty_is_refused(measure: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([[[0.1, 0.2, 0.4], [0.3, 0.3, 0.1]]], requires_grad=True)
    (slope,) = torch.autograd.grad(measure(x).sum(), x)
    assert slope.abs().sum() > 0
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(measure(x).sum(), x, create_graph=True)
