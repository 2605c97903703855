"""A kernel of the response's ratio: 1 on policy, a maximum, and 0 on both sides."""

import math

import pytest
import torch
from torch import Tensor

from rlprims.losses import vespo
from rlprims.testing import check_loss
from tests.records import DETACHED_WEIGHT, SCORE_FUNCTION, Record, one_more

RECORDS = [
    Record(
        "losses.vespo",
        check_loss,
        matters={
            **{"k_pos": 1.0, "lambda_pos": 1.0, "k_neg": 1.0, "lambda_neg": 1.0},
            "all_reduce_rows": one_more,
        },
        exempt={**DETACHED_WEIGHT, **SCORE_FUNCTION},
    ),
]


def row(*x: float) -> Tensor:
    return torch.tensor([x], dtype=torch.float64)


def gradient(x: Tensor, sampler: Tensor, a: Tensor, **options) -> list[float]:
    leaf = x.clone().requires_grad_()
    vespo(leaf, sampler, a, torch.ones_like(x, dtype=torch.bool), **options).sum().backward()
    return leaf.grad[0].tolist()


def kernel(w: float, advantage: float = 1.0, **options) -> float:
    x = row(-1.0, -2.0)
    got = gradient(x, x - row(math.log(w) + 3, -3.0), row(advantage, advantage), **options)
    assert got[0] == pytest.approx(got[1])
    return -got[0] / advantage


@pytest.mark.parametrize(
    ("w", "advantage", "want"),
    [
        (1.0, 1.0, 1.0),
        (1.0, -1.0, 1.0),
        (2.0, 1.0, 4 * math.exp(-3)),  # w^2 e^(3 (1 - w))
        (0.5, 1.0, 0.25 * math.exp(1.5)),
        (2.0, -1.0, 8 * math.exp(-2)),  # w^3 e^(2 (1 - w))
        (0.5, -1.0, 0.125 * math.exp(1.0)),
    ],
)
def test_by_hand(w: float, advantage: float, want: float) -> None:
    assert kernel(w, advantage) == pytest.approx(want)


def test_the_maximum_is_at_k_over_lambda() -> None:
    at = [kernel(2 / 3 + d) for d in (-0.01, 0.0, 0.01)]
    assert max(at) == at[1]


@pytest.mark.parametrize("w", [1e-30, 1e30])
def test_far_away_nothing_is_learnt(w: float) -> None:
    assert kernel(w) == pytest.approx(0.0, abs=1e-12)


def test_trl_1_16() -> None:
    """trl:public:trl_grpo_loss.vespo/000, the first two of 5 responses, a token mean of 20."""
    one = gradient(
        row(-0.001, -1.071645, -0.997296, -0.768468, -1.465515),
        row(-0.119013, -1.055892, -1.003103, -0.361181, -1.400833),
        row(*[-0.7908245] * 5),
    )
    two = gradient(row(-1.169637, -1.802627, -2.076072), row(-1.144754, -1.470118, -2.258369), row(*[0.1174246] * 3))
    assert [g / 20 for g in one] == pytest.approx([0.02442777] * 5, abs=1e-6)
    assert [g / 20 for g in two] == pytest.approx([-0.00669755] * 3, abs=1e-6)


@pytest.mark.parametrize("name", ["k_pos", "lambda_pos", "k_neg", "lambda_neg"])
def test_a_power_below_zero_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        kernel(1.0, **{name: -1.0})
