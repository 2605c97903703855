"""A squared log-ratio, of the response or of each token, beside REINFORCE."""

import pytest
import torch
from torch import Tensor

from rlprims.losses import opmd, reinforce, seq_mean_token_sum
from rlprims.testing import check_loss
from tests.records import Record, one_more

RECORDS = [
    Record(
        "losses.opmd",
        check_loss,
        matters={"tau": 1.0, "level": "token", "all_reduce_rows": one_more},
        exempt={"impossible tokens are finite": "grows with the log-ratio, which is infinite"},
    ),
    Record(
        "losses.opmd",
        check_loss,
        call={"level": "token"},
        exempt={"impossible tokens are finite": "grows with the log-ratio, which is infinite"},
    ),
]


def row(*x: float) -> Tensor:
    return torch.tensor([x], dtype=torch.float64)


def loss_and_gradient(x: Tensor, old: Tensor, a: Tensor, **options) -> tuple[float, list[float]]:
    """Of the response."""
    leaf, mask = x.clone().requires_grad_(), torch.ones_like(x, dtype=torch.bool)
    loss = seq_mean_token_sum(opmd(leaf, old, a, mask, **options), mask)
    loss.backward()
    return loss.item(), leaf.grad[0].tolist()


def test_the_response_by_hand() -> None:
    # log-ratios 1 and 2: D = 3, so 0.25 * 9 = 2.25, and 0.5 * 3 on each token; minus A (-4), minus A
    loss, gradient = loss_and_gradient(row(-1.0, -3.0), row(-2.0, -5.0), row(2, 2), tau=0.5)
    assert loss == pytest.approx(2.25 + 8)
    assert gradient == pytest.approx([1.5 - 2] * 2)


def test_tokens_by_hand() -> None:
    loss, gradient = loss_and_gradient(row(-1.0, -3.0), row(-2.0, -5.0), row(2, 2), tau=0.5, level="token")
    assert loss == pytest.approx(0.25 * (1 + 4) + 8)
    assert gradient == pytest.approx([0.5 - 2, 1.0 - 2])


def test_tokens_that_cancel_are_no_distance_for_the_response() -> None:
    x, old, a = row(-1.0, -3.0), row(-2.0, -2.0), row(0, 0)
    assert loss_and_gradient(x, old, a)[0] == 0
    assert loss_and_gradient(x, old, a, tau=1.0, level="token")[0] == pytest.approx(1.0)


def test_opmd_pulls_back_from_far_away() -> None:
    _, (gradient,) = loss_and_gradient(row(-900.0), row(-1.0), row(0), tau=1.0)
    assert gradient == -899


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_on_policy_it_is_reinforce(level: str) -> None:
    x, a = row(-1.0, -2.0), row(2.0, -3.0)
    mask = torch.ones_like(x, dtype=torch.bool)
    assert torch.equal(opmd(x, x, a, mask, level=level), reinforce(x, a, mask))
    assert loss_and_gradient(x, x, a, level=level)[1] == [-2.0, 3.0]


@pytest.mark.parametrize(
    ("log_prob", "old", "advantage", "gradient"),
    [
        (-1.842257, -1.858259, -0.282103, 0.008694),
        (-1.831955, -2.073818, 2.233919, -0.065496),
        (-0.777629, -0.986856, -0.201944, 0.008022),
    ],
)
def test_dro_of_verl_0_9_1(log_prob: float, old: float, advantage: float, gradient: float) -> None:
    """verl:public:policy_loss.dro/000, beta 0.3, a token mean of 33."""
    _, (got,) = loss_and_gradient(row(log_prob), row(old), row(advantage), tau=0.3, level="token")
    assert got / 33 == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("options", [{"level": "turn"}, {"tau": 0.0}])
def test_options_that_make_no_sense_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        loss_and_gradient(row(0.0), row(0.0), row(1.0), **options)
