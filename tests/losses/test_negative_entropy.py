"""The entropy bonus has the sign that makes minimizing explore."""

import torch

from rlprims.losses import negative_entropy
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.negative_entropy", check_loss),
]


def test_minimizing_raises_the_entropy() -> None:
    entropies = torch.tensor([[0.7, 0.1]], requires_grad=True)
    negative_entropy(entropies, torch.tensor([[True, False]])).sum().backward()
    assert entropies.grad.tolist() == [[-1.0, 0.0]]
