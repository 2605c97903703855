"""Three policies: the clip is around one, the samples are another's."""

import math

import pytest
import torch

from rlprims.corrections import importance_weights
from rlprims.losses import clipped_surrogate, decoupled_ppo
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record(
        "losses.decoupled_ppo",
        check_loss,
        matters={"clip_low": 0.1, "clip_high": 0.28, "w_max": 1.01},
        exempt={
            "on policy it is reinforce": "the law leaves the behaviour policy apart, and its weight with it",
            "impossible tokens are finite": "impossible under both constants, so that their ratio is of 0 to 0",
        },
    ),
]

GENERATOR = torch.Generator().manual_seed(0)
X, OLD, ROLLOUT, A = torch.randn(4, 3, 5, generator=GENERATOR, dtype=torch.float64)
MASK = torch.rand(3, 5, generator=GENERATOR) < 0.7


def loss_and_gradient(now: float, old: float, rollout: float, advantage: float, **options) -> tuple[float, float]:
    """Of a token with these probabilities."""
    x = torch.tensor([[math.log(now)]], dtype=torch.float64, requires_grad=True)
    others = [torch.tensor([[math.log(p)]], dtype=torch.float64) for p in (old, rollout)]
    loss = decoupled_ppo(x, *others, torch.full_like(x, advantage), torch.tensor([[True]]), **options)
    loss.sum().backward()
    return loss.item(), x.grad.item()


@pytest.mark.parametrize(
    ("now", "old", "rollout", "advantage", "options", "loss", "gradient"),
    [
        (0.22, 0.2, 0.1, 1.0, {}, -2.2, -2.2),  # ratio 1.1, weight 2
        (0.3, 0.2, 0.1, 1.0, {}, -2.4, 0.0),  # ratio 1.5 is clipped to 1.2 around the proximal policy
        (0.3, 0.2, 0.1, -1.0, {}, 3.0, 3.0),
        (0.3, 0.2, 0.1, -1.0, {"w_max": 1.5}, 2.25, 2.25),
        (0.2, 0.2, 0.8, 1.0, {"w_max": 1.5}, -0.25, -0.25),
    ],
)
def test_by_hand(now, old, rollout, advantage, options, loss: float, gradient: float) -> None:
    assert loss_and_gradient(now, old, rollout, advantage, **options) == pytest.approx((loss, gradient))


def test_on_policy_it_is_reinforce() -> None:
    assert loss_and_gradient(0.3, 0.3, 0.3, 2.0) == pytest.approx((-2.0, -2.0))


def test_a_sampler_that_is_the_proximal_policy_makes_it_ppo() -> None:
    got = decoupled_ppo(X, OLD, OLD, A, MASK, clip_high=0.28)
    assert torch.equal(got, clipped_surrogate(X, OLD, A, MASK, clip_high=0.28))


def test_truncated_it_is_ppo_times_importance_weights() -> None:
    got = decoupled_ppo(X, OLD, ROLLOUT, A, MASK, w_max=2.0)
    want = clipped_surrogate(X, OLD, A, MASK) * importance_weights(OLD, ROLLOUT, MASK, high=2.0).values
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("log_prob", "old", "rollout", "advantage", "gradient"),
    [
        (-1.337932, -1.42179, -1.135028, -1.13536, 0.926859),
        (-0.525473, -0.851361, -0.971085, 0.202172, 0.0),
        (-0.717572, -0.50795, -0.935113, 0.941648, -1.170483),
    ],
)
def test_skyrl(log_prob: float, old: float, rollout: float, advantage: float, gradient: float) -> None:
    """skyrl:public:skyrl_loss.regular_tis_token/000 (git a9564572e), clip 0.2 and 0.28, weights up to 2."""
    clip = {"clip_high": 0.28, "w_max": 2.0}
    got = loss_and_gradient(math.exp(log_prob), math.exp(old), math.exp(rollout), advantage, **clip)
    assert got[1] == pytest.approx(gradient, abs=3e-6)


def test_a_clip_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_high"):
        loss_and_gradient(0.5, 0.5, 0.5, 1.0, clip_high=-0.1)


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="w_max"):
        loss_and_gradient(0.5, 0.5, 0.5, 1.0, w_max=0.5)
