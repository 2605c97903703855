"""Ratios and their clips, far from 1 and on either side."""

import pytest
import torch

from rlprims.losses import cispo, clipped_surrogate


@pytest.mark.parametrize("a", [1.0, -1.0])
def test_r1_a_clipped_overflow_has_a_gradient_that_is_a_number(a: float) -> None:
    """TRL, NeMo-RL, AReaL, slime, prime-rl#2084: min(∞, 1.2) is 1.2, and its gradient 0 · ∞."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    x, peer = (torch.tensor([[-0.1]], requires_grad=True) for _ in range(2))
    old = torch.tensor([[-800.0]])
    clipped_surrogate(x, old, torch.full((1, 1), a), mask).sum().backward()
    ratio = (peer - old).exp()
    (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)).sum().backward()
    assert x.grad is not None
    assert peer.grad is not None
    assert x.grad.isfinite().all()
    assert not peer.grad.isfinite().all()


@pytest.mark.parametrize("a", [1.0, -1.0])
@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.8), (1.0, 1.0), (2.0, 1.2)])
def test_r5_cispo_bounds_the_weight_on_both_sides_whatever_the_sign(a: float, ratio: float, weight: float) -> None:
    """trl 97ca1a256 (conditions the wrong way round), SkyRL fdfcb4352 (bounds of 0): every token keeps −w A."""
    x = torch.tensor([[ratio]]).log().requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool)
    cispo(x, torch.zeros(1, 1), torch.full((1, 1), a), mask, w_min=0.8, w_max=1.2).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([[-weight * a]]))
