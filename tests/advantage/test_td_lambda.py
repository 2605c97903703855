"""λ-returns."""

import pytest
import torch

from rlprims.advantage import discounted_returns, td_lambda
from rlprims.testing import check_advantage
from tests.records import FIRST_OF_TWO, Record

RECORDS = [
    Record("advantage.td_lambda", check_advantage, matters={"gamma": 0.9, "lam": 0.5, "shard": FIRST_OF_TWO}),
    Record("advantage.td_lambda", check_advantage, call={"gamma": 0.99, "lam": 0.0}),
]

CLOSE = {"rtol": 0, "atol": 1e-12}


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


FULL = torch.ones(1, 3, dtype=torch.bool)


def test_three_steps_by_hand() -> None:
    """rlax 0.1.9, torchrl 0.14.1: G2 = 3; G1 = 2 + ½ (½ 0.4 + ½ 3); G0 = 1 + ½ (½ 0.2 + ½ G1)."""
    got = td_lambda(row(1, 2, 3), row(9, 0.2, 0.4), FULL, gamma=0.5, lam=0.5)
    torch.testing.assert_close(got, row(1.7625, 2.85, 3), **CLOSE)


def test_the_default_lambda_is_that_of_the_papers() -> None:
    """G2 = 3; G1 = 2 + 0.05·0.4 + 0.95·3 = 4.87; G0 = 1 + 0.05·0.2 + 0.95·4.87."""
    torch.testing.assert_close(td_lambda(row(1, 2, 3), row(9, 0.2, 0.4), FULL), row(5.6365, 4.87, 3), **CLOSE)


def test_lambda_one_is_the_discounted_return_and_zero_the_one_step_target() -> None:
    rewards, values, beyond = row(1, 2, 3), row(9, 0.2, 0.4), torch.tensor([8.0], dtype=torch.float64)
    got = td_lambda(rewards, values, FULL, bootstrap_values=beyond, gamma=0.5, lam=1.0)
    torch.testing.assert_close(got, discounted_returns(rewards, FULL, bootstrap_values=beyond, gamma=0.5), **CLOSE)
    got = td_lambda(rewards, values, FULL, bootstrap_values=beyond, gamma=0.5, lam=0.0)
    torch.testing.assert_close(got, row(1.1, 2.2, 7), **CLOSE)


def test_tool_tokens_are_skipped() -> None:
    mask = torch.tensor([[True, False, True]])
    got = td_lambda(row(0, 9, 1), row(0.3, 9, 0.5), mask, lam=0.5)
    assert got[0].tolist() == pytest.approx([0.75, 0, 1])
