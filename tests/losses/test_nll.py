"""−log π."""

import torch

from rlprims.losses import nll, reinforce, token_mean
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.nll", check_loss),
]


def test_it_is_reinforce_with_advantage_one() -> None:
    x = -torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) < 0.6
    assert torch.equal(nll(x, mask), reinforce(x, torch.ones(3, 4), mask))


def test_on_correct_responses_alone_the_mean_is_over_their_tokens() -> None:
    """VAPO's term: two correct tokens in the first row, a wrong response in the second."""
    x = torch.tensor([[-1.0, -3.0, -7.0], [-9.0, -9.0, -9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    correct = mask & torch.tensor([True, False])[:, None]
    loss = token_mean(nll(x, correct), correct)
    loss.backward()
    assert loss.item() == 2.0
    assert x.grad.tolist() == [[-0.5, -0.5, 0.0], [0.0, 0.0, 0.0]]
