"""Steps between states whose values are means over continuations."""

import pytest
import torch
from torch import Tensor

from rlprims.advantage import gae, vineppo
from rlprims.testing import check_advantage
from tests.records import Record

RECORDS = [
    Record("advantage.vineppo", check_advantage, matters={"gamma": 0.5}),
]

CLOSE = {"rtol": 0, "atol": 1e-12}


def rows(*numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


MASK = torch.tensor([[True, True, False, True, True]])
STEPS = torch.tensor([[0, 0, 0, 1, 2]])
VALUES = rows([0.5, 0.5, 9.0, 0.75, 0.25])
REWARDS = rows([0.0, 0.0, 9.0, 0.0, 1.0])


def test_by_hand() -> None:
    """¾ − ½, ¼ − ¾ and 1 + 0 − ¼, on each token of a step; the tool's token is in none."""
    got = vineppo(REWARDS, VALUES, STEPS, MASK)
    torch.testing.assert_close(got, rows([0.25, 0.25, 0, -0.5, 0.75]), **CLOSE)


def test_rewards_along_the_way_and_a_discount_by_step() -> None:
    got = vineppo(rows([1.0, 2.0, 9.0, 0.0, 1.0]), VALUES, STEPS, MASK, gamma=0.5)
    torch.testing.assert_close(got, rows([3 - 0.125, 3 - 0.125, 0, -0.625, 0.75]), **CLOSE)


def test_a_truncated_response_goes_on_from_its_last_state() -> None:
    got = vineppo(torch.zeros_like(REWARDS), VALUES, STEPS, MASK, bootstrap_values=rows([0.5])[0])
    torch.testing.assert_close(got, rows([0.25, 0.25, 0, -0.5, 0.25]), **CLOSE)


def test_advantages_of_the_steps_add_up_to_the_outcome_less_the_first_value() -> None:
    got = vineppo(REWARDS, VALUES, STEPS, MASK)
    assert float(got[0, [1, 3, 4]].sum()) == pytest.approx(1.0 - 0.5)


def test_vineppo_with_steps_of_one_token_is_gae_without_lambda() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 6, generator=generator) < 0.8
    got = vineppo(rewards, values, torch.arange(6).expand(3, 6), mask, gamma=0.9)
    torch.testing.assert_close(got, gae(rewards, values, mask, gamma=0.9, lam=0.0), **CLOSE)


def test_steps_that_are_not_numbered_are_refused() -> None:
    with pytest.raises(ValueError, match="turn_ids has dtype"):
        vineppo(REWARDS, VALUES, VALUES, MASK)
