"""PPO's clip: by the table of ratio against sign of the advantage, on the bounds, and far away."""

import math

import pytest
import torch
from torch import Tensor

from rlprims.losses import clipped_surrogate
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.clipped_surrogate", check_loss, matters={"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.5}),
    Record("losses.clipped_surrogate", check_loss, call={"dual_clip": 3.0}),
]


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


def test_dual_clip_does_not_change_good_actions() -> None:
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


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_on_the_dual_clip_the_unclipped_gradient_passes(sign: float) -> None:
    """Of a token with A < 0; one with A > 0 does not see it."""
    log_probs = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    old = -torch.tensor([[1.5]], dtype=torch.float64).log()
    assert (log_probs - old).exp().item() == 1.5
    a = torch.full((1, 1), sign, dtype=torch.float64)
    loss = clipped_surrogate(log_probs, old, a, torch.tensor([[True]]), clip_high=2.0, dual_clip=1.5)
    loss.sum().backward()
    assert loss.item() == pytest.approx(-1.5 * sign)
    assert log_probs.grad.item() == pytest.approx(-1.5 * sign)


def test_at_a_log_ratio_of_20_the_gradient_passes_and_beyond_it_does_not() -> None:
    log_probs = torch.tensor([[20.0, 20.001, -20.0, -20.001]], requires_grad=True)
    ones = torch.ones(1, 4)
    for sign, passes in ((-1.0, [True, False, False, False]), (1.0, [False, False, True, False])):
        losses = clipped_surrogate(log_probs, torch.zeros(1, 4), sign * ones, ones.bool())
        (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
        assert gradient[0].ne(0).tolist() == passes
        torch.testing.assert_close(gradient[0][passes], losses[0, passes], rtol=0, atol=0)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_on_policy_the_gradient_is_reinforces_to_the_bit(dual_clip: float | None) -> None:
    """Both terms of the maximum are equal there, and each has the whole gradient, so that no half of it is lost."""
    generator = torch.Generator().manual_seed(0)
    old, a = torch.randn(2, 3, 5, generator=generator)
    log_probs = old.clone().requires_grad_()
    clipped_surrogate(log_probs, old, a, torch.ones(3, 5, dtype=torch.bool), dual_clip=dual_clip).sum().backward()
    assert torch.equal(log_probs.grad, -a)


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


LARGE = (1030, 300)


def random_batch(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ratios on both sides of every bound, some beyond e^20; holes in the mask with values that must not be read."""
    generator = torch.Generator().manual_seed(0)
    log_probs, noise, advantages = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    old = log_probs + noise * torch.where(torch.rand(shape, generator=generator) < 0.1, 30.0, 0.5)
    mask = torch.rand(shape, generator=generator) < 0.7
    poison = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38]).repeat(mask.numel() // 4 + 1)[: mask.numel()]
    poisoned = (torch.where(mask, x, poison.view(shape)).to(dtype) for x in (log_probs, old, advantages))
    return *poisoned, mask


def by_quadrant(
    x: Tensor, old: Tensor, a: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor]:
    """Losses and gradients of valid tokens in float64, from the table: where the ratio stops, and at what value."""
    log_ratio = (x - old).double()
    ratio, a = log_ratio.clamp(-20, 20).exp(), a.double()
    stop_high = torch.where(a > 0, high, torch.inf if dual is None else dual)
    stop_low = torch.where(a > 0, 0.0, low).double()
    stopped = (ratio > stop_high) | (ratio < stop_low) | (log_ratio.abs() > 20)
    losses = -a * torch.minimum(torch.maximum(ratio, stop_low), stop_high)
    return losses, torch.where(stopped, 0.0, losses)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("shape", [(3, 7), LARGE])
@pytest.mark.parametrize("packed", [False, True])
def test_a_random_batch_keeps_the_table_of_quadrants(
    shape: tuple[int, int], dual_clip: float | None, packed: bool
) -> None:
    log_probs, old, advantages, mask = random_batch(shape)
    want = by_quadrant(log_probs[mask], old[mask], advantages[mask], 0.8, 1.28, dual_clip)
    tokens, cu_seqlens = (log_probs, old, advantages, mask), None
    if packed:
        tokens, cu_seqlens = tuple(x.flatten() for x in tokens), torch.arange(shape[0] + 1) * shape[1]
    x = tokens[0].requires_grad_()
    losses = clipped_surrogate(*tokens, cu_seqlens, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    losses.sum().backward()
    for got, expected in zip((losses, x.grad), want, strict=True):
        torch.testing.assert_close(got.view(shape)[mask].double(), expected, rtol=3e-7, atol=0)
        assert (got.view(shape)[~mask] == 0).all()


def test_the_graph_can_be_used_twice() -> None:
    log_probs, old, advantages, mask = random_batch((3, 7))
    loss = clipped_surrogate(log_probs.requires_grad_(), old, advantages, mask).sum()
    first, second = (torch.autograd.grad(loss, log_probs, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_gradcheck_with_ratios_on_both_sides_of_every_bound(dual_clip: float | None) -> None:
    log_probs, old, advantages, mask = random_batch((4, 5), torch.float64)
    log_probs = torch.where(mask, log_probs, 0.0).requires_grad_()  # gradcheck moves masked entries too
    assert torch.autograd.gradcheck(
        lambda x: clipped_surrogate(x, old, advantages, mask, dual_clip=dual_clip), log_probs
    )


def test_clipped_surrogate_compiles_to_one_graph_with_the_same_gradient() -> None:
    log_probs, old, advantages, mask = random_batch((3, 7))
    log_probs.requires_grad_()
    compiled = torch.compile(clipped_surrogate, fullgraph=True, backend="aot_eager")
    want, got = (f(log_probs, old, advantages, mask, dual_clip=3.0) for f in (clipped_surrogate, compiled))
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(y.sum(), log_probs)[0] for y in (want, got)))
