"""What was wrong in the estimators once, by name."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rlprims import advantage
from rlprims.advantage import (
    RoleBaseline,
    ValueTracker,
    gae,
    gdpo,
    grpo,
    optimal_value,
    pass_at_k_training,
    quantile_baseline,
    whiten,
)
from rlprims.testing._cases import Batch, make_batch

ESTIMATORS = sorted(name for name in advantage.__all__ if inspect.isfunction(getattr(advantage, name)))
REQUIRED: dict[str, dict[str, Any]] = {"pkpo": {"k": 2}, "clip_advantages": {"low": -0.5, "high": 0.5}}
GROUPED = [name for name in ESTIMATORS if "group_ids" in inspect.signature(getattr(advantage, name)).parameters]


def answer(name: str, batch: Batch, **options: Any) -> Tensor:
    estimator: Callable[..., Tensor] = getattr(advantage, name)
    data = {p: batch.data[p] for p in inspect.signature(estimator).parameters if p in batch.data}
    return estimator(**data, **REQUIRED.get(name, {}), **options)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TestTheGradientOfConstantGroupsWasNaN:
    """The root of a variance of 0 has an infinite slope, and 0 · ∞ is NaN: in quantile and gdpo."""

    ids = torch.tensor([0, 0, 0, 1, 1])
    mask = torch.ones(5, 1, dtype=torch.bool)
    scores = torch.tensor([[0.1], [0.1], [0.1], [1.0], [4.0]])

    @pytest.mark.parametrize("eps", [1e-6, 0.0])
    @pytest.mark.parametrize("ddof", [0, 1])
    @pytest.mark.parametrize("estimator", [grpo, quantile_baseline, pass_at_k_training])
    def test_of_one_reward(self, estimator: Callable[..., Tensor], ddof: int, eps: float) -> None:
        rewards = self.scores.clone().requires_grad_()
        a = estimator(rewards, self.ids, self.mask, normalize_std=True, ddof=ddof, eps=eps)
        (grad,) = torch.autograd.grad(a.square().sum(), rewards, create_graph=True)
        assert (a[:3] == 0).all()
        assert grad.isfinite().all()
        assert (grad[:3] == 0).all()
        (second,) = torch.autograd.grad(grad.square().sum() + a.sum(), rewards)
        assert second.isfinite().all()

    @pytest.mark.parametrize("whiten_over", ["responses", "tokens", "none"])
    @pytest.mark.parametrize("all_equal", [False, True])
    def test_of_several_rewards(self, whiten_over: str, all_equal: bool) -> None:
        scores = torch.cat([self.scores, self.scores], dim=1)
        scores = (torch.full_like(scores, 0.1) if all_equal else scores).requires_grad_()
        for eps in (1e-6, 0.0):
            a = gdpo(scores, self.ids, self.mask, eps=eps, whiten_eps=eps, whiten_over=whiten_over)
            (grad,) = torch.autograd.grad(a.square().sum(), scores)
            assert a.isfinite().all()
            assert grad.isfinite().all()

    @pytest.mark.parametrize("name", GROUPED)
    def test_of_no_estimator(self, name: str) -> None:
        batch = make_batch(0)
        data = {
            "rewards": torch.zeros_like(batch.data["rewards"]),
            "component_scores": torch.full_like(batch.data["component_scores"], 0.3),
            "scores": torch.full_like(batch.data["scores"], 0.3),
        }
        leaf = next(p for p in inspect.signature(getattr(advantage, name)).parameters if p in data)
        x = data[leaf].requires_grad_()
        (grad,) = torch.autograd.grad(answer(name, batch.replace(**{leaf: x})).square().sum(), x)
        assert grad.isfinite().all()

    def test_of_whitening_equal_advantages(self) -> None:
        x = torch.full((2, 3), 0.1, requires_grad=True)
        for eps in (1e-8, 0.0):
            (grad,) = torch.autograd.grad(whiten(x, torch.ones(2, 3, dtype=torch.bool), eps=eps).square().sum(), x)
            assert grad.isfinite().all()


SURROUNDINGS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


class TestNumbersDependedOnTheSurroundings:
    """On autocast, where sums of squares are vector products; on the default dtype, where integers meet floats."""

    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    @pytest.mark.parametrize("surrounding", SURROUNDINGS)
    @pytest.mark.parametrize("name", ESTIMATORS)
    def test_of_no_estimator(self, name: str, surrounding: str, dtype: torch.dtype, packed: bool) -> None:
        batch = make_batch(0, dtype=dtype)
        batch = batch.pack() if packed else batch
        want = answer(name, batch)
        with SURROUNDINGS[surrounding]():
            got = answer(name, batch)
        torch.testing.assert_close(got, want, rtol=0, atol=0)  # and of the same dtype
        assert got.dtype is torch.promote_types(dtype, torch.float32)

    @pytest.mark.parametrize("surrounding", SURROUNDINGS)
    def test_the_rank_of_a_quantile(self, surrounding: str) -> None:
        """0.61 · 500 = 305, and 304 in bfloat16."""
        rewards, mask = torch.arange(500, dtype=torch.float32)[:, None], torch.ones(500, 1, dtype=torch.bool)
        with SURROUNDINGS[surrounding]():
            a = quantile_baseline(rewards, torch.zeros(500, dtype=torch.int64), mask, level=0.61, normalize_std=False)
        assert a[304, 0] == 0

    @pytest.mark.parametrize("surrounding", SURROUNDINGS)
    def test_of_no_tracker(self, surrounding: str) -> None:
        with SURROUNDINGS[surrounding]():
            roles, tracker = RoleBaseline(), ValueTracker()
            roles.update(["a", "b"], torch.tensor([0.3, 1.0], dtype=torch.float32))
            tracker.update(["a"], *torch.tensor([[0.3], [0.01]], dtype=torch.float32))
            baselines = roles.baseline(["a", "b"]), tracker.baseline(["a", "new"])
        assert all(b.dtype is torch.float32 for b in baselines)
        assert baselines[0].tolist() == pytest.approx([0.015, 0.05])
        assert baselines[1][1] == 0.5


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_mask_of_other_bytes_than_one_was_counted_by_its_bytes(name: str, packed: bool) -> None:
    """``view(torch.bool)`` keeps the bytes; a mask made of 2 counted twice as many tokens."""
    batch = make_batch(0, width=40)
    batch = batch.pack() if packed else batch
    if name == "optimal_value":
        batch = batch.replace(valid_rows=torch.ones(8, dtype=torch.bool))
    twos = {
        x: (batch.data[x].to(torch.uint8) * 2).view(torch.bool)
        for x in ("response_mask", "valid_rows")
        if x in batch.data
    }
    assert twos["response_mask"].view(torch.uint8).max() == 2
    torch.testing.assert_close(answer(name, batch.replace(**twos)), answer(name, batch), rtol=0, atol=0)


def test_boundaries_that_end_too_soon_made_a_sequence_of_the_rest() -> None:
    """cu_seqlens of [0, 2] on four tokens: the last two were one more sequence."""
    x, mask = torch.ones(4), torch.ones(4, dtype=torch.bool)
    for wrong in ([0, 2], [0, 3, 1, 4], [1, 4], [0, 6], [0]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            gae(x, x, mask, torch.tensor(wrong))
    with pytest.raises(ValueError, match="cu_seqlens runs from 0 to 2, expected 0 to 4, the number of packed tokens"):
        gae(x, x, mask, torch.tensor([0, 2]))


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "optimal_value"])
def test_every_estimator_refuses_such_boundaries(name: str) -> None:
    batch = make_batch(0).pack()
    cu = batch.data["cu_seqlens"].clone()
    cu[-1] -= 1
    with pytest.raises(ValueError, match="cu_seqlens runs from 0"):
        answer(name, batch.replace(cu_seqlens=cu))


def test_a_reference_score_that_is_not_valid_made_the_gradient_nan() -> None:
    """optimal_value took exp of it and selected afterwards."""
    scores = torch.tensor([1.0, torch.nan, 0.5, 1e38], requires_grad=True)
    valid = torch.tensor([True, False, True, False])
    values = optimal_value(scores, torch.zeros(4, dtype=torch.int64), valid)
    assert values.isfinite().all()
    (grad,) = torch.autograd.grad(values.sum(), scores)
    weights = torch.tensor([1.0, 0.5]).div(0.5).softmax(0) * 4  # the slope of β log mean exp(s/β), in each of 4 rows
    torch.testing.assert_close(grad, torch.tensor([float(weights[0]), 0, float(weights[1]), 0]))


@pytest.mark.parametrize("whiten_over", ["responses", "tokens"])
def test_a_valid_nan_left_the_masked_tokens_at_nan(whiten_over: str) -> None:
    """whiten, and what whitens by the batch, multiplied 0 by a scale of NaN."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    got = whiten(torch.tensor([[1.0, torch.nan, 9.0], [2.0, 9.0, 9.0]]), mask)
    assert (got[~mask] == 0).all()
    scores = torch.tensor([[torch.nan], [1.0]])
    assert (gdpo(scores, torch.tensor([0, 0]), mask, whiten_over=whiten_over)[~mask] == 0).all()
