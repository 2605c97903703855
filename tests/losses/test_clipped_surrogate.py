"""PPO's clip: by the table of ratio against sign of the advantage, on the bounds, and far away."""

import math

import pytest
import torch

from rlprims.losses import clipped_surrogate


def loss_and_gradient(ratio: float, advantage: float, **clip: float) -> tuple[float, float]:
    """Of one token, the gradient with respect to its log-prob."""
    log_probs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([[advantage]], dtype=torch.float64)
    loss = clipped_surrogate(log_probs, torch.zeros_like(a), a, torch.tensor([[True]]), **clip)
    loss.sum().backward()
    return loss.item(), log_probs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (0.5, 1.0, -0.5, -0.5),  # below, A > 0: come back
        (1.0, 1.0, -1.0, -1.0),
        (2.0, 1.0, -1.28, 0.0),  # above, A > 0: clipped
        (0.5, -1.0, 0.8, 0.0),  # below, A < 0: clipped
        (1.0, -1.0, 1.0, 1.0),
        (2.0, -1.0, 2.0, 2.0),  # above, A < 0: come back
        (2.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_four_quadrants(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    got = loss_and_gradient(ratio, advantage, clip_low=0.2, clip_high=0.28)
    assert got == pytest.approx((loss, gradient), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "plain", "dual", "gradient"), [(0.5, 0.8, 0.8, 0.0), (2.0, 2.0, 2.0, 2.0), (5.0, 5.0, 3.0, 0.0)]
)
def test_dual_clip(ratio: float, plain: float, dual: float, gradient: float) -> None:
    assert loss_and_gradient(ratio, -1.0)[0] == pytest.approx(plain)
    assert loss_and_gradient(ratio, -1.0, dual_clip=3.0) == pytest.approx((dual, gradient), abs=1e-12)


def test_dual_clip_leaves_good_actions_alone() -> None:
    assert loss_and_gradient(5.0, 1.0, dual_clip=3.0) == loss_and_gradient(5.0, 1.0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("bound", [0.75, 1.25])  # exact in binary, so that the ratio is on the bound and not near it
def test_on_a_bound_the_unclipped_gradient_passes(bound: float, advantage: float) -> None:
    log_probs = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    old = -torch.tensor([[bound]], dtype=torch.float64).log()
    assert (log_probs - old).exp().item() == bound
    a = torch.full((1, 1), advantage, dtype=torch.float64)
    clipped_surrogate(log_probs, old, a, torch.tensor([[True]]), clip_low=0.25, clip_high=0.25).sum().backward()
    assert log_probs.grad.item() == pytest.approx(-advantage * bound)


def test_a_wide_clip_is_the_importance_weighted_gradient() -> None:
    for ratio in (0.01, 1.0, 50.0):
        assert loss_and_gradient(ratio, 2.0, clip_low=1.0, clip_high=1e9) == pytest.approx((-2 * ratio, -2 * ratio))


def test_a_masked_token_of_ratio_e_to_the_hundred() -> None:
    log_probs = torch.tensor([[0.0, 100.0]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    loss = clipped_surrogate(log_probs, torch.zeros(1, 2), torch.ones(1, 2), mask)
    loss.sum().backward()
    assert loss.tolist() == [[-1.0, 0.0]]
    assert log_probs.grad.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("old", [-800.0, -1e4, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_that_overflows_has_no_nan_in_its_gradient(old: float, advantage: float) -> None:
    log_probs = torch.tensor([[-0.1]], requires_grad=True)
    a = torch.tensor([[advantage]])
    loss = clipped_surrogate(log_probs, torch.tensor([[old]]), a, torch.tensor([[True]]))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("clip", "blamed"),
    [({"clip_low": 1.5}, "clip_low"), ({"clip_high": -0.1}, "clip_high"), ({"dual_clip": 1.0}, "dual_clip")],
)
def test_bounds_that_make_no_sense_are_refused(clip: dict[str, float], blamed: str) -> None:
    with pytest.raises(ValueError, match=blamed):
        loss_and_gradient(1.0, 1.0, **clip)
