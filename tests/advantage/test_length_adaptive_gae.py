"""A λ for each response."""

import math

import pytest
import torch

from rlprims.advantage import gae, length_adaptive_gae, td_lambda
from rlprims.testing import check_advantage
from tests.records import FIRST_OF_TWO, Record

RECORDS = [
    Record(
        "advantage.length_adaptive_gae",
        check_advantage,
        call={"alpha": 0.4},
        matters={"gamma": 0.9, "alpha": 0.3, "shard": FIRST_OF_TWO},
    ),
    Record("advantage.length_adaptive_gae", check_advantage),
]

CLOSE = {"rtol": 0, "atol": 1e-12}


def ragged(*lengths: int) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def test_each_response_has_the_lambda_of_its_length() -> None:
    """α = ½: λ = 1 − 2/l, which is 0, ½ and ¾ for 2, 4 and 8 tokens."""
    mask = ragged(2, 4, 8)
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, *mask.shape, generator=generator, dtype=torch.float64)
    beyond = torch.randn(3, generator=generator, dtype=torch.float64)
    got = length_adaptive_gae(rewards, values, mask, None, beyond, gamma=0.9, alpha=0.5)
    for row, lam in enumerate((0.0, 0.5, 0.75)):
        i = slice(row, row + 1)
        want = gae(rewards[i], values[i], mask[i], None, beyond[i], gamma=0.9, lam=lam)
        torch.testing.assert_close(got[i], want, **CLOSE)


def test_tool_tokens_do_not_make_it_longer() -> None:
    mask = torch.tensor([[True, False, False, True, True, True]])
    rewards = torch.tensor([[0, 9, 9, 0, 0, 1]], dtype=torch.float64)
    got = length_adaptive_gae(rewards, torch.zeros_like(rewards), mask, alpha=0.5)[mask]
    assert got.tolist() == [0.125, 0.25, 0.5, 1]


def test_a_response_too_short_for_the_formula_has_lambda_zero() -> None:
    """1 − 1/(0.05 · 20) = 0 and below it less than 0; NeMo-RL 7ea279abf clamps as well. 40 tokens have ½."""
    mask = ragged(3, 20, 40)
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[torch.arange(3), mask.sum(-1) - 1] = 1.0
    got = length_adaptive_gae(rewards, torch.zeros_like(rewards), mask)
    torch.testing.assert_close(got[:2], rewards[:2], **CLOSE)
    assert got[2, 38] == pytest.approx(0.5)


def test_the_end_reaches_the_first_token_of_a_long_response() -> None:
    lengths = (400, 4_000)
    mask = ragged(*lengths)
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[torch.arange(2), mask.sum(-1) - 1] = 1.0
    first = length_adaptive_gae(rewards, torch.zeros_like(rewards), mask)[:, 0]
    assert (first > math.exp(-21)).all()  # λ^l is near exp(−20)
    assert gae(rewards, torch.zeros_like(rewards), mask, lam=0.95)[1, 0] < 1e-80


def test_the_critic_may_have_a_lambda_of_its_own() -> None:
    """VAPO's critic learns from λ = 1, which is the reward-to-go; the policy's λ of ½ leaves half of the critic in."""
    mask, values = ragged(4), torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    assert td_lambda(rewards, values, mask, lam=1.0)[0].tolist() == pytest.approx([1, 1, 1, 1])
    policy = length_adaptive_gae(rewards, values, mask, alpha=0.5)[0].tolist()
    assert policy == pytest.approx([0.25, 0.3, 0.4, 0.6])  # A2 = 0.1 + 0.6/2, A1 = 0.1 + 0.4/2, A0 = 0.1 + 0.3/2


def test_length_adaptive_gae_is_biased_by_the_length_that_it_knows() -> None:
    """A fair coin says after each token whether the response ends; the third token is the last. Values are exact.

    After a first token that goes on, Q − V is 1 − 2 = −1 by hand; a λ of any number for all would expect just that.
    """
    mask = ragged(1, 2, 3)
    chance = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    rewards = torch.diag(torch.tensor([3.0, 2.0, 0.0], dtype=torch.float64))
    values = torch.tensor([[2.0, 1.0, 0.0]] * 3, dtype=torch.float64)  # ½ 3 + ½ (½ 2 + ½ 0), ...
    went_on = chance[1:] / chance[1:].sum()
    fixed = gae(rewards, values, mask, lam=0.5)[1:, 0]
    assert float(went_on @ fixed) == pytest.approx(-1)
    adaptive = length_adaptive_gae(rewards, values, mask, alpha=1.0)[1:, 0]
    assert adaptive.tolist() == pytest.approx([-1 + 1 / 2, -1 - 2 / 3])  # λ is 1/2 and 2/3
    assert float(went_on @ adaptive) == pytest.approx(-1 - 1 / 12)


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan])
def test_an_alpha_that_is_not_positive_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        length_adaptive_gae(torch.zeros(1, 1), torch.zeros(1, 1), ragged(1), alpha=alpha)
