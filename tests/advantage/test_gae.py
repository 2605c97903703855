"""Generalized advantage estimation: worked by hand, and at its limits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.advantage import discounted_returns, gae
from rlprims.testing import check_advantage
from tests.records import FIRST_OF_TWO, Record

RECORDS = [
    Record("advantage.gae", check_advantage, matters={"gamma": 0.9, "lam": 0.5, "shard": FIRST_OF_TWO}),
    Record("advantage.gae", check_advantage, call={"gamma": 0.99, "lam": 0.0}),
    Record("advantage.gae", check_advantage, call={"lam": 1.0}),
]

CLOSE = {"rtol": 0, "atol": 1e-12}


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def full(n: int) -> torch.Tensor:
    return torch.ones(1, n, dtype=torch.bool)


def test_two_steps_by_hand() -> None:
    # δ1 = 1 − 0.4 = 0.6; δ0 = 0 + 0.9·0.4 − 0.2 = 0.16; A0 = 0.16 + 0.45·0.6 = 0.43
    got = gae(row(0, 1), row(0.2, 0.4), full(2), gamma=0.9, lam=0.5)
    torch.testing.assert_close(got, row(0.43, 0.6), **CLOSE)


def test_the_default_lambda_is_that_of_the_papers() -> None:
    # δ1 = 1 − 0.4 = 0.6; δ0 = 0 + 0.4 − 0.2 = 0.2; A0 = 0.2 + 0.95·0.6 = 0.77
    torch.testing.assert_close(gae(row(0, 1), row(0.2, 0.4), full(2)), row(0.77, 0.6), **CLOSE)


def test_a_gap_of_tool_tokens() -> None:
    mask = torch.tensor([[True, True, False, False, True, True]])
    values = row(0.1, 0.2, 50.0, -70.0, 0.3, 0.4)
    advantages = gae(row(0, 0, 9, 9, 0, 1), values, mask, gamma=1.0, lam=0.95)
    torch.testing.assert_close(advantages, row(0.799675, 0.7365, 0, 0, 0.67, 0.6), **CLOSE)
    returns = torch.where(mask, advantages + values, 0.0)
    torch.testing.assert_close(returns, row(0.899675, 0.9365, 0, 0, 0.97, 1.0), **CLOSE)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**31))
def test_gae_equals_that_of_the_sequence_without_its_gaps(
    holes: list[bool], gamma: float, lam: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([holes])
    rewards, values = torch.randn(2, 1, len(holes), generator=generator, dtype=torch.float64)
    bootstrap = torch.randn(1, generator=generator, dtype=torch.float64)
    got = gae(rewards, values, mask, bootstrap_values=bootstrap, gamma=gamma, lam=lam)[mask]
    short = mask[mask][None]
    want = gae(rewards[mask][None], values[mask][None], short, bootstrap_values=bootstrap, gamma=gamma, lam=lam)
    torch.testing.assert_close(got, want[0], **CLOSE)


def test_fifty_tool_tokens_cost_nothing() -> None:
    mask = torch.cat([full(2), torch.zeros(1, 50, dtype=torch.bool), full(1)], dim=1)
    rewards, values = torch.zeros(1, 53, dtype=torch.float64), torch.full((1, 53), 0.5, dtype=torch.float64)
    rewards[0, -1] = 1.0
    got = gae(rewards, values, mask, gamma=0.5, lam=0.5)[mask]
    torch.testing.assert_close(got, gae(row(0, 0, 1), row(0.5, 0.5, 0.5), full(3), gamma=0.5, lam=0.5)[0], **CLOSE)


def test_lambda_one_is_monte_carlo() -> None:
    rewards, values = row(1, -2, 0.5, 3), row(0.3, 0.1, -0.7, 2)
    got = gae(rewards, values, full(4), gamma=0.9, lam=1.0)
    torch.testing.assert_close(got, discounted_returns(rewards, full(4), gamma=0.9) - values, **CLOSE)


def test_lambda_zero_is_the_one_step_error() -> None:
    got = gae(row(1, 2, 3), row(0.1, 0.2, 0.3), full(3), gamma=0.5, lam=0.0)
    torch.testing.assert_close(got, row(1 + 0.1 - 0.1, 2 + 0.15 - 0.2, 3 - 0.3), **CLOSE)


def test_gamma_zero_sees_one_reward() -> None:
    got = gae(row(1, 2, 3), row(0.1, 0.2, 0.3), full(3), gamma=0.0, lam=0.95)
    torch.testing.assert_close(got, row(0.9, 1.8, 2.7), **CLOSE)


def test_truncation_is_not_termination() -> None:
    rewards, values = row(0, 0), row(0.2, 0.4)
    ended = gae(rewards, values, full(2), gamma=1.0, lam=1.0)
    cut = gae(rewards, values, full(2), bootstrap_values=torch.tensor([0.7]), gamma=1.0, lam=1.0)
    torch.testing.assert_close(ended, row(-0.2, -0.4), **CLOSE)
    torch.testing.assert_close(cut, row(0.5, 0.3), rtol=0, atol=1e-7)


def test_the_bootstrap_waits_behind_padding() -> None:
    mask = torch.tensor([[True, True, False]])
    got = gae(row(0, 0, 5), row(0.2, 0.4, 9), mask, bootstrap_values=torch.tensor([1.0]), gamma=0.5, lam=1.0)
    torch.testing.assert_close(got, row(0.25 - 0.2, 0.5 - 0.4, 0), **CLOSE)


def test_gae_of_a_perfect_critic_is_zero() -> None:
    values = row(0.81, 0.9, 1.0)
    got = gae(row(0, 0, 1), values, full(3), gamma=0.9, lam=0.3)
    torch.testing.assert_close(got, torch.zeros_like(values), **CLOSE)


@pytest.mark.parametrize(
    ("length", "dtype", "rtol"), [(1_000, torch.float32, 2e-5), (10_000, torch.float64, 1e-11)], ids=str
)
def test_long_sequences_keep_their_precision(length: int, dtype: torch.dtype, rtol: float) -> None:
    gamma = 1 - 2**-14  # exact in float32
    rewards = torch.zeros(1, length, dtype=dtype)
    rewards[0, -1] = 1.0
    got = gae(rewards, torch.zeros_like(rewards), full(length), gamma=gamma, lam=1.0)
    want = gamma ** torch.arange(length - 1, -1, -1, dtype=torch.float64)[None]
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=0)


def test_bootstrap_values_of_another_batch_size_are_refused() -> None:
    with pytest.raises(ValueError, match="bootstrap_values"):
        gae(row(0, 1), row(0, 1), full(2), bootstrap_values=torch.zeros(2))


def test_the_gradient_of_a_bootstrap_value_alone() -> None:
    start = torch.tensor([0.7], requires_grad=True)
    gae(row(0, 0), row(0.2, 0.4), full(2), bootstrap_values=start, gamma=0.5, lam=1.0).sum().backward()
    assert start.grad is not None
    assert start.grad.item() == 0.5 + 0.25
