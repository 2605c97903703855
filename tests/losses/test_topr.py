"""Good responses as they are, bad ones weighted by how likely they still are."""

import math

import pytest
import torch
from torch import Tensor

from rlprims.losses import topr
from rlprims.testing import check_loss
from tests.records import DETACHED_WEIGHT, SCORE_FUNCTION, Record, one_more

RECORDS = [
    Record(
        "losses.topr",
        check_loss,
        matters={"level": "token", "w_max": 2.0, "all_reduce_rows": one_more},
        exempt={**DETACHED_WEIGHT, **SCORE_FUNCTION},
    ),
    Record("losses.topr", check_loss, call={"level": "token"}, exempt={**DETACHED_WEIGHT, **SCORE_FUNCTION}),
]


def row(*x: float) -> Tensor:
    return torch.tensor([x], dtype=torch.float64)


def loss_and_gradient(x: Tensor, sampler: Tensor, a: Tensor, **options) -> tuple[list[float], list[float]]:
    leaf = x.clone().requires_grad_()
    loss = topr(leaf, sampler, a, torch.ones_like(x, dtype=torch.bool), **options)
    loss.sum().backward()
    return loss[0].tolist(), leaf.grad[0].tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"), [(0.1, 1.0, 1.0), (9.0, 1.0, 1.0), (0.1, -1.0, 0.1), (9.0, -1.0, 1.0)]
)
def test_a_response_of_two_tokens(ratio: float, advantage: float, weight: float) -> None:
    x = row(-1.0, -2.0)
    sampler = x - row(math.log(ratio) + 5, -5.0)  # only the product counts
    loss, gradient = loss_and_gradient(x, sampler, row(advantage, advantage))
    assert loss == pytest.approx([weight * advantage, 2 * weight * advantage])
    assert gradient == pytest.approx([-weight * advantage] * 2)


def test_token_ratios() -> None:
    x = row(-1.0, -1.0)
    _, gradient = loss_and_gradient(x, x - row(math.log(0.25), math.log(4)), row(-1, -1), level="token")
    assert gradient == pytest.approx([0.25, 1.0])


def test_a_larger_bound_and_none() -> None:
    x = row(-1.0)
    for w_max, weight in ((3.0, 3.0), (math.inf, 4.0)):
        assert loss_and_gradient(x, x - math.log(4), row(-1), w_max=w_max)[1] == pytest.approx([weight])


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_on_policy_it_is_reinforce(level: str) -> None:
    x, a = row(-1.0, -2.0, -3.0), row(2.0, -3.0, 0.0)
    assert loss_and_gradient(x, x, a, level=level)[1] == pytest.approx((-a)[0].tolist())


@pytest.mark.parametrize("options", [{"level": "turn"}, {"w_max": 0.5}])
def test_options_that_make_no_sense_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        loss_and_gradient(row(0.0), row(0.0), row(1.0), **options)
