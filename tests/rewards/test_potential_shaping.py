"""Potentials move credit between tokens, and nothing between responses."""

import pytest
import torch

from rlprims.advantage import discounted_returns
from rlprims.rewards import at_last_token, potential_shaping
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record("rewards.potential_shaping", check_reward, matters={"gamma": 0.9}),
    Record("rewards.potential_shaping", check_reward, call={"gamma": 0.0}),
]

PHI = torch.tensor([[0.2, 0.5, 9.0, 0.4], [0.2, 0.1, 0.9, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False, True], [True, True, True, False]])


def test_by_hand() -> None:
    got = potential_shaping(PHI, MASK, gamma=0.5)
    want = [[0.25 - 0.2, 0.2 - 0.5, 0, -0.4], [0.05 - 0.2, 0.45 - 0.1, -0.9, 0]]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_every_return_falls_by_its_own_potential(gamma: float) -> None:
    """G_t(r + F) = G_t(r) − Φ_t, the statement of the paper: what is subtracted does not depend on what follows."""
    rewards = at_last_token(torch.tensor([1.0, -2.0], dtype=torch.float64), MASK)
    plain = discounted_returns(rewards, MASK, gamma=gamma)
    shaped = discounted_returns(rewards + potential_shaping(PHI, MASK, gamma=gamma), MASK, gamma=gamma)
    torch.testing.assert_close(plain - shaped, torch.where(MASK, PHI, 0.0))


def test_the_first_token_alone() -> None:
    assert potential_shaping(torch.tensor([[0.5]]), torch.tensor([[True]])).tolist() == [[-0.5]]


def test_a_discount_outside_zero_and_one_is_refused() -> None:
    with pytest.raises(ValueError, match="gamma"):
        potential_shaping(PHI, MASK, gamma=1.5)
