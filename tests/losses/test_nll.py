"""−log π."""

import math

import pytest
import torch

from rlprims.losses import nll, token_mean
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.nll", check_loss),
]


def test_a_token_of_probability_one_eighth_costs_three_bits() -> None:
    log_probs, mask = torch.tensor([[0.125, 0.5]]).log(), torch.tensor([[True, False]])
    assert (nll(log_probs, mask) / math.log(2.0))[0].tolist() == pytest.approx([3.0, 0.0])


def test_on_correct_responses_alone_the_mean_is_over_their_tokens() -> None:
    """VAPO's term: two correct tokens in the first row, a wrong response in the second."""
    x = torch.tensor([[-1.0, -3.0, -7.0], [-9.0, -9.0, -9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    correct = mask & torch.tensor([True, False])[:, None]
    loss = token_mean(nll(x, correct), correct)
    loss.backward()
    assert loss.item() == 2.0
    assert x.grad.tolist() == [[-0.5, -0.5, 0.0], [0.0, 0.0, 0.0]]
