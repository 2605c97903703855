"""Entropy of the next-token distribution."""

import math

import pytest
import torch

from rlprims.logprobs import entropy_from_logits
from rlprims.testing import check_logits
from tests.records import A_SHARD, Record

RECORDS = [
    Record("logprobs.entropy_from_logits", check_logits, matters={"temperature": 0.5, "vocab": A_SHARD}),
    Record("logprobs.entropy_from_logits", check_logits, call={"temperature": 0.7}),
]


def test_uniform_peaked_and_in_between() -> None:
    logits = torch.tensor([[0.0] * 8, [100.0] + [0.0] * 7, [math.log(3.0), 0.0] + [-math.inf] * 6], dtype=torch.float64)
    between = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert entropy_from_logits(logits).tolist() == pytest.approx([math.log(8), 0.0, between], abs=1e-12)


def test_entropy_from_logits_is_between_zero_and_log_v() -> None:
    logits = 30 * torch.randn(200, 17, generator=torch.Generator().manual_seed(0))
    got = entropy_from_logits(logits)
    assert (got >= 0).all()
    assert (got <= math.log(17) * (1 + 1e-6)).all()


def test_temperature_divides_the_logits() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(entropy_from_logits(logits, temperature=0.5), entropy_from_logits(2 * logits))


def test_banned_tokens_have_finite_gradients() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf], [2.0, -math.inf, -math.inf]], requires_grad=True)
    entropy_from_logits(logits).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 2] == 0
    assert (logits.grad[1] == 0).all()


def test_the_gradient_of_a_uniform_distribution_is_zero() -> None:
    logits = torch.full((1, 4), 3.0, dtype=torch.float64, requires_grad=True)
    entropy_from_logits(logits).sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros(1, 4, dtype=torch.float64), rtol=0, atol=1e-12)


def test_many_blocks_equal_one() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(12, 50_000, generator=generator)).requires_grad_()
    weights = torch.randn(12, generator=generator)
    got = entropy_from_logits(logits)
    (gradient,) = torch.autograd.grad(got, logits, weights)
    for i in range(12):
        want = logits[i].detach().double().requires_grad_()
        value = torch.distributions.Categorical(logits=want).entropy()
        (slope,) = torch.autograd.grad(value, want, weights[i].double())
        assert got[i].item() == pytest.approx(value.item(), rel=2e-5)
        torch.testing.assert_close(gradient[i].double(), slope, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_lose_nothing_more(dtype: torch.dtype) -> None:
    logits = (5 * torch.randn(64, 1_000, generator=torch.Generator().manual_seed(0))).to(dtype)
    got = entropy_from_logits(logits)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), entropy_from_logits(logits.double()), rtol=1e-6, atol=1e-6)


def test_a_row_outside_the_loss_has_gradient_zero() -> None:
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    got = entropy_from_logits(logits)
    (gradient,) = torch.autograd.grad(got, logits, torch.tensor([1.0, 0.0, 0.0, 1.0]))
    assert (gradient[1:3] == 0).all()
    assert (gradient[0] != 0).any()


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        entropy_from_logits(torch.zeros(1, 2), temperature=0.0)
