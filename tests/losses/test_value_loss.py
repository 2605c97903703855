"""Half the squared error, with PPO's clip."""

import pytest
import torch

from rlprims.losses import value_loss
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.value_loss", check_loss, matters={"clip": 0.5, "huber_delta": 0.5}),
    Record("losses.value_loss", check_loss, call={"clip": 0.5}),
    Record("losses.value_loss", check_loss, call={"clip": 0.5, "huber_delta": 0.5}),
]


def loss_and_gradient(
    new: float, old: float, target: float, clip: float | None = None, huber_delta: float | None = None
) -> tuple[float, float]:
    v = torch.tensor([[new]], dtype=torch.float64, requires_grad=True)
    old_v, r = (torch.tensor([[x]], dtype=torch.float64) for x in (old, target))
    loss = value_loss(v, old_v, r, torch.tensor([[True]]), clip=clip, huber_delta=huber_delta)
    loss.sum().backward()
    return loss.item(), v.grad.item()


@pytest.mark.parametrize(
    ("new", "old", "target", "clip", "loss", "gradient"),
    [
        (3.0, 0.0, 2.0, None, 0.5, 1.0),
        (3.0, 0.0, 2.0, 0.5, 1.125, 0.0),  # V' = 0.5 is farther from 2 than 3 is: no gradient
        (0.25, 0.0, 2.0, 0.5, 1.53125, -1.75),  # within the clip
        (5.0, 0.0, -1.0, 0.5, 18.0, 6.0),  # away from the target: the larger, unclipped error
    ],
)
def test_by_hand(new: float, old: float, target: float, clip: float | None, loss: float, gradient: float) -> None:
    assert loss_and_gradient(new, old, target, clip) == (loss, gradient)


def test_a_wide_clip_is_none() -> None:
    assert loss_and_gradient(3.0, -1.0, 2.0, 1e9) == loss_and_gradient(3.0, -1.0, 2.0)


def test_the_clipped_loss_is_never_smaller() -> None:
    x, old, target = torch.randn(3, 5, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones(5, 20, dtype=torch.bool)
    assert (value_loss(x, old, target, mask, clip=0.3) >= value_loss(x, old, target, mask)).all()


@pytest.mark.parametrize("new", [0.5, -0.5])
def test_on_the_clip_the_unclipped_gradient_passes(new: float) -> None:
    assert loss_and_gradient(new, 0.0, 2.0, 0.5) == ((new - 2) ** 2 / 2, new - 2)


def test_values_are_not_read_without_a_clip() -> None:
    assert loss_and_gradient(3.0, float("nan"), 2.0) == (0.5, 1.0)


def test_a_clip_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="clip"):
        loss_and_gradient(1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("new", "old", "target", "clip", "loss", "gradient"),
    [
        (3.0, 0.0, 2.0, None, 0.5, 1.0),  # within δ: the square
        (7.0, 0.0, 2.0, None, 8.0, 2.0),  # 2 (5 − 1)
        (-3.0, 0.0, 2.0, None, 8.0, -2.0),
        (4.0, 0.0, 2.0, None, 2.0, 2.0),  # at δ the two meet
        (7.0, 0.0, 2.0, 0.5, 8.0, 2.0),  # V' = 0.5 has 1.125
        (3.0, 0.0, 6.0, 0.5, 9.0, 0.0),  # V' = 0.5 has 2 (5.5 − 1), V has 4
    ],
)
def test_huber_with_delta_two(
    new: float, old: float, target: float, clip: float | None, loss: float, gradient: float
) -> None:
    assert loss_and_gradient(new, old, target, clip, huber_delta=2.0) == (loss, gradient)


def test_a_wide_delta_is_the_square() -> None:
    assert loss_and_gradient(3.0, -1.0, 2.0, 0.5, huber_delta=1e9) == loss_and_gradient(3.0, -1.0, 2.0, 0.5)


@pytest.mark.parametrize("delta", [0.0, -1.0])
def test_a_delta_that_is_not_above_zero_is_refused(delta: float) -> None:
    with pytest.raises(ValueError, match="huber_delta"):
        loss_and_gradient(1.0, 1.0, 1.0, huber_delta=delta)
