"""KL in the reward."""

import pytest
import torch

from rlprims.rewards import kl_penalty
from rlprims.testing import check_reward
from tests.records import Record

RECORDS = [
    Record("rewards.kl_penalty", check_reward, call={"kl_coef": 0.1}, matters={"kl_coef": 0.2, "estimator": "k3"}),
    Record("rewards.kl_penalty", check_reward, call={"kl_coef": 0.1, "estimator": "k3"}),
]

MASK = torch.tensor([[True, True, False]])
OLD = torch.tensor([[-1.0, -2.0, 9.0]], dtype=torch.float64)
REF = torch.tensor([[-1.5, -1.0, -9.0]], dtype=torch.float64)
REWARDS = torch.tensor([[0.0, 1.0, 5.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimator", "want"), [("k1", [-0.05, 1.1, 0]), ("k2", [-0.0125, 0.95, 0]), ("abs", [-0.05, 0.9, 0])]
)
def test_by_hand(estimator: str, want: list[float]) -> None:
    got = kl_penalty(REWARDS, OLD, REF, MASK, kl_coef=0.1, estimator=estimator)
    assert got[0].tolist() == pytest.approx(want)


def test_a_coefficient_of_zero_leaves_the_rewards() -> None:
    got = kl_penalty(REWARDS, OLD, REF, MASK, kl_coef=0.0)
    assert got.tolist() == [[0, 1, 0]]


def test_kl_penalty_is_a_reward_and_carries_no_gradient() -> None:
    old = OLD.clone().requires_grad_()
    assert not kl_penalty(REWARDS, old, REF, MASK, kl_coef=0.1).requires_grad


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="'k5'"):
        kl_penalty(REWARDS, OLD, REF, MASK, kl_coef=0.1, estimator="k5")
