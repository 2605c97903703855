"""A region of probability: who has left it, in which direction, by either measure."""

import math

import pytest
import torch

from rlprims.losses import dppo
from rlprims.testing import check_loss
from tests.records import DERIVATIVES, Record

RECORDS = [
    Record(
        "losses.dppo",
        check_loss,
        matters={"divergence": "kl", "threshold_low": 0.01, "threshold_high": 0.01, "w_max": 1.01},
    ),
    Record(
        "losses.dppo",
        check_loss,
        call={"divergence": "kl", "threshold_low": 0.001, "threshold_high": 0.001, "w_max": 1.1},
        exempt=dict.fromkeys(DERIVATIVES, "the bounded weight is a constant"),
    ),
]


def loss_and_gradient(now: float, then: float, advantage: float, **options) -> tuple[float, float]:
    """Of a token with these probabilities under the current policy and the sampler."""
    x = torch.tensor([[math.log(now)]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[math.log(then)]], dtype=torch.float64)
    loss = dppo(x, q, torch.full_like(q, advantage), torch.tensor([[True]]), **options)
    loss.sum().backward()
    return loss.item(), x.grad.item()


@pytest.mark.parametrize(
    ("now", "then", "advantage", "weight"),
    [
        (0.5, 0.5, 1.0, 1.0),
        (0.9, 0.6, 1.0, 0.0),  # rose by 0.3, and A > 0: out
        (0.9, 0.6, -1.0, 1.5),  # come back
        (0.6, 0.9, -1.0, 0.0),
        (0.6, 0.9, 1.0, 2 / 3),
        (0.1, 0.01, 1.0, 10.0),  # a ratio of 10 is no distance
        (0.7, 0.6, 1.0, 7 / 6),
    ],
)
def test_total_variation(now: float, then: float, advantage: float, weight: float) -> None:
    assert loss_and_gradient(now, then, advantage) == pytest.approx((-weight * advantage,) * 2)


@pytest.mark.parametrize(
    ("now", "then", "advantage", "weight"),
    [
        # q = 0.6, p = 0.9: 0.6 log(2/3) + 0.4 log(4) = 0.311239
        (0.9, 0.6, 1.0, 0.0),
        (0.9, 0.6, -1.0, 1.5),
        # q = 0.9, p = 0.6: 0.9 log(1.5) + 0.1 log(0.25) = 0.226290
        (0.6, 0.9, -1.0, 0.0),
        # q = 0.6, p = 0.65: 0.6 log(12/13) + 0.4 log(8/7) = 0.005387
        (0.65, 0.6, 1.0, 13 / 12),
        # q = 1, p = 0.5: log 2, and nothing of what cannot happen
        (0.5, 1.0, -1.0, 0.0),
    ],
)
def test_kl(now: float, then: float, advantage: float, weight: float) -> None:
    got = loss_and_gradient(now, then, advantage, divergence="kl", threshold_low=0.05, threshold_high=0.05)
    assert got == pytest.approx((-weight * advantage,) * 2)


def test_the_divergence_is_the_one_of_two_outcomes() -> None:
    """0.311239 nats lies between these thresholds."""
    kept = loss_and_gradient(0.9, 0.6, 1.0, divergence="kl", threshold_high=0.3113)
    lost = loss_and_gradient(0.9, 0.6, 1.0, divergence="kl", threshold_high=0.3112)
    assert (kept[0], lost[0]) == pytest.approx((-1.5, 0.0))


def test_a_bounded_weight() -> None:
    assert loss_and_gradient(0.1, 0.01, 1.0, w_max=3.0) == pytest.approx((-3.0, -3.0))
    assert loss_and_gradient(0.02, 0.01, 1.0, w_max=3.0) == pytest.approx((-2.0, -2.0))


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_on_policy_it_is_reinforce(divergence: str) -> None:
    for p in (1e-6, 0.5, 1.0):
        for advantage in (2.0, -2.0):
            got = loss_and_gradient(p, p, advantage, divergence=divergence)
            assert got == pytest.approx((-advantage, -advantage))


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_certain_tokens_are_finite(divergence: str) -> None:
    for now, then in ((1.0, 0.5), (0.5, 1.0), (1.0, 1.0)):
        for advantage in (1.0, -1.0):
            assert all(map(math.isfinite, loss_and_gradient(now, then, advantage, divergence=divergence)))


@pytest.mark.parametrize(
    ("divergence", "log_prob", "old", "advantage", "gradient", "tokens"),
    [
        ("tv", -1.551703, -1.420493, -0.728618, 0.019969, 32),
        ("tv", -1.844459, -1.761792, 0.342311, -0.009848, 32),
        ("kl", -1.356195, -1.132983, -0.179238, 0.003585, 40),
        ("kl", -0.001, -0.154472, 0.393658, 0.0, 40),  # nearly certain: out by kl, within 0.28 by tv
    ],
)
def test_verl_0_9_1(
    divergence: str, log_prob: float, old: float, advantage: float, gradient: float, tokens: int
) -> None:
    """verl:public:policy_loss.dppo_tv/000 and dppo_kl/000, thresholds 0.2 and 0.28, token means."""
    region = {"divergence": divergence, "threshold_low": 0.2, "threshold_high": 0.28, "w_max": 20.0}
    got = loss_and_gradient(math.exp(log_prob), math.exp(old), advantage, **region)
    assert got[1] / tokens == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(
    "options", [{"divergence": "js"}, {"threshold_low": -0.1}, {"threshold_high": -0.1}, {"w_max": 0.5}]
)
def test_options_that_make_no_sense_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        loss_and_gradient(0.5, 0.5, 1.0, **options)


def test_a_weight_of_at_most_one_will_do() -> None:
    """A ratio of 2, held at 1."""
    assert loss_and_gradient(0.02, 0.01, 1.0, w_max=1.0) == pytest.approx((-1.0, -1.0))
