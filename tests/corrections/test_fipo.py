"""Future-KL influence: by hand, beside discounted returns, and in valid tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlprims import algorithms
from rlprims.advantage import discounted_returns
from rlprims.corrections import fipo, tis
from rlprims.losses import clipped_surrogate
from rlprims.testing import check_weights
from tests.records import Record

RECORDS = [
    Record(
        "corrections.fipo",
        check_weights,
        call={"w_min": 0.5, "w_max": 2.0},
        matters={"half_life": 1.0, "w_min": 0.9, "w_max": 1.1, "max_ratio": 1.5, "safe_ratio": 0.5},
    ),
    Record("corrections.fipo", check_weights),
]

CLOSE = {"rtol": 0, "atol": 1e-12}
WIDE = {"w_min": 0.0, "w_max": math.inf}


def rows(*numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def weights(d: Tensor, mask: Tensor | None = None, a: float = 1.0, **hyperparameters: float) -> Tensor:
    """Of log-ratios."""
    mask = torch.ones_like(d, dtype=torch.bool) if mask is None else mask
    return fipo(d, torch.zeros_like(d), torch.full_like(d, a), mask, **hyperparameters).values


def test_by_hand() -> None:
    """Half-life 1: F = 0.3 + ½ (−0.2) + ¼ 0.4 = 0.3, −0.2 + ½ 0.4 = 0 and 0.4."""
    got = weights(rows([0.3, -0.2, 0.4]), half_life=1.0, **WIDE)
    torch.testing.assert_close(got, rows([0.3, 0.0, 0.4]).exp(), **CLOSE)


def test_a_difference_counts_half_after_half_life_tokens() -> None:
    d = torch.zeros(1, 33, dtype=torch.float64)
    d[0, -1] = 0.1
    assert float(weights(d, **WIDE)[0, 0].log()) == pytest.approx(0.05)


def test_on_policy_every_weight_is_one() -> None:
    log_probs = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) < 0.7
    for bounds in ({}, {"w_min": 0.8}, WIDE):
        got = fipo(log_probs, log_probs, log_probs, mask, **bounds).values
        assert torch.equal(got, mask.float())


@given(st.integers(0, 2**31), st.floats(0.5, 40.0))
def test_fipo_is_the_clipped_exponential_of_discounted_returns_of_log_ratios(seed: int, half_life: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    d = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 9, generator=generator) < 0.8
    future = discounted_returns(d, mask, gamma=2 ** (-1 / half_life))
    want = torch.where(mask, future.exp().clamp(0.7, 1.6), 0.0)
    got = weights(d, mask, half_life=half_life, w_min=0.7, w_max=1.6, max_ratio=math.inf)
    torch.testing.assert_close(got, want, **CLOSE)


def test_tokens_of_a_large_ratio_are_left_out_of_the_future_and_still_weighed() -> None:
    d = rows([0.1, math.log(11.0), 0.2])
    got = weights(d, half_life=1.0, **WIDE)
    torch.testing.assert_close(got, rows([0.1 + 0.2 / 4, 0.2 / 2, 0.2]).exp(), **CLOSE)


def test_fipo_weighs_likelier_tokens_to_be_unlearned_one_at_most() -> None:
    d = rows([math.log(5.0), math.log(3.0)])
    assert weights(d, a=-1.0).tolist() == [[1.0, 1.2]]
    assert weights(d, a=1.0).tolist() == [[1.2, 1.2]]
    assert weights(-d, a=-1.0, w_min=0.8).tolist() == [[0.8, 0.8]]


def test_fipo_counts_only_the_future() -> None:
    """A token's weight does not see the tokens before it."""
    d = rows([0.1, 0.2, 0.3])
    changed = rows([9.0, 0.2, 0.3])
    assert torch.equal(weights(d, **WIDE)[0, 1:], weights(changed, **WIDE)[0, 1:])


def test_the_weighed_loss_is_that_of_weighed_advantages() -> None:
    """f · min(ρ A, clip(ρ) A) is what the authors compute with f A, since f is not negative."""
    generator = torch.Generator().manual_seed(0)
    d, a = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    mask = torch.ones(3, 6, dtype=torch.bool)
    f = fipo(d, torch.zeros_like(d), a, mask, half_life=2.0, w_min=0.5, w_max=3.0)
    got = clipped_surrogate(d, torch.zeros_like(d), a, mask) * f.values
    torch.testing.assert_close(got, clipped_surrogate(d, torch.zeros_like(d), a * f.values, mask), **CLOSE)


def test_fipo_accounts_for_no_gap() -> None:
    d = rows([0.1])
    mask = torch.ones_like(d, dtype=torch.bool)
    product = tis(d, torch.zeros_like(d), mask) * fipo(d, torch.zeros_like(d), d, mask)
    assert product.corrected == tis(d, torch.zeros_like(d), mask).corrected


def test_weights_of_a_later_update_reach_the_loss_by_the_stages() -> None:
    preset = algorithms.fipo()
    d = rows([0.0, 0.1, 0.05])
    mask = torch.ones_like(d, dtype=torch.bool)
    data = {"log_probs": d, "old_log_probs": torch.zeros_like(d), "advantages": torch.ones_like(d)}
    weighed = algorithms.token_weights(preset, {**data, "response_mask": mask})["loss_weights"]
    assert bool((weighed > 1).all())
    losses = algorithms.policy_losses(preset, {**data, "response_mask": mask, "loss_weights": weighed})
    torch.testing.assert_close(losses, -weighed * d.exp(), **CLOSE)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"w_min": 1.1}, "w_min=1.1"), ({"w_max": 0.9}, "w_max=0.9"), ({"half_life": 0.0}, "half_life=0.0")],
)
def test_bounds_that_leave_one_out_are_refused(wrong: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        weights(rows([0.0]), **wrong)
