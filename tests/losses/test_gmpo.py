"""Each token's log-ratio is held on PPO's side, then averaged."""

import math

import pytest
import torch
from torch import Tensor

from rlprims.losses import gmpo, seq_mean_token_mean
from rlprims.testing import check_loss
from tests.records import SHARED_RATIO, Record, one_more

RECORDS = [
    Record(
        "losses.gmpo",
        check_loss,
        matters={"clip_low": 0.1, "clip_high": 0.1, "all_reduce_rows": one_more},
        exempt=SHARED_RATIO,
    ),
]


def row(*x: float) -> Tensor:
    return torch.tensor([x], dtype=torch.float64)


def loss_and_gradient(x: Tensor, old: Tensor, a: Tensor, **clip: float) -> tuple[float, list[float]]:
    """Of the response."""
    leaf, mask = x.clone().requires_grad_(), torch.ones_like(x, dtype=torch.bool)
    loss = seq_mean_token_mean(gmpo(leaf, old, a, mask, **clip), mask)
    loss.backward()
    return loss.item(), leaf.grad[0].tolist()


@pytest.mark.parametrize(
    ("d", "advantage", "mean", "gradient"),
    [
        ((0.6, 0.0), 1.0, 0.2, (0.0, 0.5)),  # 0.6 is held at 0.4 and has no gradient
        ((0.6, 0.0), -1.0, 0.3, (0.5, 0.5)),
        ((-0.6, 0.0), 1.0, -0.3, (0.5, 0.5)),
        ((-0.6, 0.0), -1.0, -0.2, (0.0, 0.5)),
    ],
)
def test_the_four_quadrants(d, advantage: float, mean: float, gradient) -> None:
    got = loss_and_gradient(row(*d), row(0, 0), row(advantage, advantage))
    slope = -advantage * math.exp(mean)
    assert got[0] == pytest.approx(slope)
    assert got[1] == pytest.approx([slope * g for g in gradient])


def test_a_token_without_an_advantage_counts_as_one_that_did_not_move() -> None:
    loss, gradient = loss_and_gradient(row(0.6, 0.2), row(0, 0), row(0, 1))
    assert loss == pytest.approx(-math.exp(0.1) / 2)  # the mean of 0 and 0.2
    assert gradient == pytest.approx([0.0, -math.exp(0.1) / 4])


def test_on_policy_a_response_shares_its_advantage() -> None:
    assert loss_and_gradient(row(0, 0), row(0, 0), row(2, 2)) == (-2.0, [-1.0, -1.0])


def test_verl_0_9_1() -> None:
    """verl:public:policy_loss.geo_mean/000, second of 6 responses; the second token is beyond −0.2."""
    _, got = loss_and_gradient(
        row(-1.220113, -2.601472, -0.763791, -0.456679),
        row(-1.15394, -2.302331, -0.955754, -0.406271),
        row(*[-0.923334] * 4),
        clip_low=0.2,
        clip_high=0.28,
    )
    assert [g / 6 for g in got] == pytest.approx([0.037292, 0.0, 0.037292, 0.037292], abs=1e-6)


@pytest.mark.parametrize("clip", [{"clip_low": -0.1}, {"clip_high": -0.1}])
def test_bounds_below_zero_are_refused(clip: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(clip))):
        loss_and_gradient(row(0.0), row(0.0), row(1.0), **clip)
