"""Pairs by hand, the paper's gradient, and what the losses of pairs refuse alike."""

import math

import pytest
import torch
from torch import Tensor

from rlprims.layout import sequence_sum
from rlprims.losses import dpo, ipo
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.dpo", check_loss, matters={"beta": 0.2, "label_smoothing": 0.1}),
]


def pairs(*rows: tuple[float, ...]) -> list[Tensor]:
    """Chosen, rejected, and both under the reference, from one row for each pair."""
    return list(torch.tensor(rows, dtype=torch.float64).T.clone())


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def test_by_hand() -> None:
    """Δ = (−10 + 12) − (−15 + 14) = 3, and the same the wrong way round."""
    got = dpo(*pairs((-10.0, -15.0, -12.0, -14.0), (-15.0, -10.0, -14.0, -12.0)), beta=0.5)
    assert got.tolist() == pytest.approx([-log_sigmoid(1.5), -log_sigmoid(-1.5)])  # 0.201413, 1.701413


def test_smoothed_labels() -> None:
    got = dpo(*pairs((-10.0, -15.0, -12.0, -14.0)), beta=0.5, label_smoothing=0.2).item()
    assert got == pytest.approx(-0.8 * log_sigmoid(1.5) - 0.2 * log_sigmoid(-1.5))


def test_smoothed_labels_are_best_at_a_finite_margin() -> None:
    """At σ(β Δ) = 1 − ε the gradient is 0."""
    margin = math.log(0.8 / 0.2) / 0.1
    chosen, *rest = pairs((margin, 0.0, 0.0, 0.0))
    chosen.requires_grad_()
    dpo(chosen, *rest, beta=0.1, label_smoothing=0.2).sum().backward()
    assert chosen.grad.item() == pytest.approx(0.0, abs=1e-12)


def test_the_gradient_is_the_papers() -> None:
    """−β σ(−β Δ) (∇ log π(chosen) − ∇ log π(rejected)): pairs ranked wrongly weigh more. Through tokens and sums."""
    generator = torch.Generator().manual_seed(0)
    log_probs = (-torch.rand(4, 5, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(4, 5, generator=generator) < 0.7
    chosen, rejected = sequence_sum(log_probs, mask)[0::2], sequence_sum(log_probs, mask)[1::2]
    ref = torch.tensor([[-1.0, -3.0], [-4.0, -2.0]], dtype=torch.float64)
    (got,) = torch.autograd.grad(dpo(chosen, rejected, ref[:, 0], ref[:, 1], beta=0.3).sum(), log_probs)
    margin = (chosen - ref[:, 0]) - (rejected - ref[:, 1])
    weight = 0.3 * torch.sigmoid(-0.3 * margin.detach())
    signed = torch.stack([-weight, weight], 1).flatten()[:, None]
    torch.testing.assert_close(got, torch.where(mask, signed, 0.0), rtol=0, atol=1e-12)


def test_far_pairs_are_finite() -> None:
    chosen, *rest = pairs((-1e4, -1.0, -1.0, -1e4), (-1.0, -1e4, -1e4, -1.0))
    chosen.requires_grad_()
    loss = dpo(chosen, *rest)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.1 * 19998, 0.0])
    assert chosen.grad.tolist() == pytest.approx([-0.1, 0.0])


@pytest.mark.parametrize("options", [{"beta": 0.0}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}])
def test_options_that_make_no_sense_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        dpo(*pairs((0.0, 0.0, 0.0, 0.0)), **options)


@pytest.mark.parametrize("loss", [dpo, ipo])
def test_log_probs_per_token_are_refused(loss) -> None:
    with pytest.raises(ValueError, match=r"one number for each response.*chosen_log_probs \(2, 3\)"):
        loss(torch.zeros(2, 3), *[torch.zeros(2)] * 3)


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rejected_log_probs has dtype torch\.int64"):
        dpo(torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2), torch.zeros(2))
