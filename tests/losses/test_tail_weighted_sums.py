"""Sums of log-probs in which the tokens after the end of the shorter response of a pair weigh less."""

import pytest
import torch

from rlprims.layout import sequence_sum
from rlprims.losses import tail_weighted_sums
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.tail_weighted_sums", check_loss, matters={"tail_weight": 0.1}),
]
MASK = torch.tensor([[True, False, True, True, True], [True, True, False, False, False]])
LOG_PROBS = -torch.tensor([[1.0, 99.0, 2.0, 4.0, 8.0], [1.0, 2.0, 99.0, 99.0, 99.0]], dtype=torch.float64)
PAIR = torch.tensor([0, 0])


@pytest.mark.parametrize(("weight", "long"), [(0.0, -3.0), (0.25, -6.0), (1.0, -15.0)])
def test_by_hand(weight: float, long: float) -> None:
    """The shorter response has two tokens; a tool's token does not count."""
    assert tail_weighted_sums(LOG_PROBS, PAIR, MASK, tail_weight=weight).tolist() == [long, -3.0]


def test_the_gradient_is_the_weight() -> None:
    x = LOG_PROBS.clone().requires_grad_()
    tail_weighted_sums(x, PAIR, MASK, tail_weight=0.25).sum().backward()
    assert x.grad.tolist() == [[1.0, 0.0, 1.0, 0.25, 0.25], [1.0, 1.0, 0.0, 0.0, 0.0]]


def test_a_response_alone_or_a_weight_of_one_is_the_sum() -> None:
    sums = sequence_sum(LOG_PROBS, MASK)
    torch.testing.assert_close(tail_weighted_sums(LOG_PROBS, PAIR, MASK, tail_weight=1.0), sums)
    torch.testing.assert_close(tail_weighted_sums(LOG_PROBS, torch.arange(2), MASK, tail_weight=0.0), sums)


def test_a_response_without_a_token_is_not_the_shorter_one() -> None:
    mask = MASK & torch.tensor([[True], [False]])
    assert tail_weighted_sums(LOG_PROBS, PAIR, mask, tail_weight=0.0).tolist() == [-15.0, 0.0]


@pytest.mark.parametrize("weight", [-0.1, 1.1])
def test_a_weight_is_a_share(weight: float) -> None:
    with pytest.raises(ValueError, match="tail_weight"):
        tail_weighted_sums(LOG_PROBS, PAIR, MASK, tail_weight=weight)
