"""−A log π."""

import torch

from rlprims.losses import reinforce
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.reinforce", check_loss),
]


def test_reinforce_of_one_token() -> None:
    log_probs = torch.tensor([[-0.5, -0.25]], requires_grad=True)
    loss = reinforce(log_probs, torch.tensor([[2.0, -4.0]]), torch.ones(1, 2, dtype=torch.bool))
    loss.sum().backward()
    assert loss.tolist() == [[1.0, -1.0]]
    assert log_probs.grad.tolist() == [[-2.0, 4.0]]
