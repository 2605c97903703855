"""Reward-to-go."""

import torch

from rlprims.advantage import discounted_returns
from rlprims.testing import check_advantage
from tests.records import FIRST_OF_TWO, Record

RECORDS = [
    Record("advantage.discounted_returns", check_advantage, matters={"gamma": 0.9, "shard": FIRST_OF_TWO}),
    Record("advantage.discounted_returns", check_advantage, call={"gamma": 0.0}),
]


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def test_a_reward_and_a_cost_per_token() -> None:
    rewards = row(-0.1, -0.1, -0.1, 0.9)  # outcome 1, KL 0.1 a token
    got = discounted_returns(rewards, torch.ones(1, 4, dtype=torch.bool))
    torch.testing.assert_close(got, row(0.6, 0.7, 0.8, 0.9), rtol=0, atol=1e-12)


def test_the_discount_counts_valid_tokens() -> None:
    mask = torch.tensor([[True, False, False, True, True]])
    got = discounted_returns(row(0, 7, 7, 0, 8), mask, gamma=0.5)
    torch.testing.assert_close(got, row(2, 0, 0, 4, 8), rtol=0, atol=0)


def test_gamma_zero_is_the_reward_itself() -> None:
    rewards = row(3, -1, 2)
    got = discounted_returns(rewards, torch.ones(1, 3, dtype=torch.bool), gamma=0.0)
    torch.testing.assert_close(got, rewards, rtol=0, atol=0)


def test_a_truncated_response_goes_on_beyond_its_end() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    got = discounted_returns(torch.zeros(2, 3), mask, bootstrap_values=torch.tensor([4.0, 0.0]), gamma=0.5)
    torch.testing.assert_close(got, torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]]), rtol=0, atol=0)
