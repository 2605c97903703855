"""Ratios of probabilities, and estimates of the KL from them."""

import math

import pytest
import torch

from rlprims.ratios import clamp_log_ratio, estimate_kl, log_ratio, sequence_log_ratio, summed_log_ratio

MASK = torch.tensor([[True, True, False], [True, False, False]])
OLD = torch.tensor([[-1.0, -2.0, torch.nan], [-3.0, torch.inf, torch.nan]])
NEW = torch.tensor([[-0.5, -2.25, torch.nan], [-30.0, torch.nan, -torch.inf]])
CU = torch.tensor([0, 3, 6])


def test_the_log_ratio_is_clamped_and_one_sided() -> None:
    new = torch.tensor([0.0, 0.0, -30.0, 5.0], requires_grad=True)
    old = torch.tensor([-1.0, -30.0, 0.0, torch.inf], requires_grad=True)
    got = log_ratio(new, old, torch.tensor([True, True, True, False]))
    got.sum().backward()
    assert got.tolist() == [1, 20, -20, 0]
    assert new.grad is not None
    assert new.grad.tolist() == [1, 0, 0, 0]
    assert old.grad is None


def test_the_clamp_keeps_exp_finite_and_its_bounds_have_a_gradient() -> None:
    x = torch.tensor([-torch.inf, -20.0, 0.5, 20.0, 20.001], requires_grad=True)
    clamp_log_ratio(x).exp().sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([0, math.exp(-20), math.exp(0.5), math.exp(20), 0])


@pytest.mark.parametrize("packed", [False, True])
def test_a_sum_over_the_sequence_is_not_clamped_and_a_ratio_of_it_is(packed: bool) -> None:
    new, old, mask = (x.flatten() if packed else x for x in (NEW, OLD, MASK))
    cu = CU if packed else None
    total = summed_log_ratio(new, old, mask, cu).reshape(2, 3)
    assert total.tolist() == [[0.25, 0.25, 0], [-27, 0, 0]]
    product = sequence_log_ratio(new, old, mask, cu, mean=False).reshape(2, 3)
    assert product.tolist() == [[0.25] * 3, [-20] * 3]
    geometric = sequence_log_ratio(new, old, mask, cu, mean=True).reshape(2, 3)
    assert geometric.tolist() == [[0.125] * 3, [-20] * 3]


def test_a_sequence_without_a_token_has_ratio_one() -> None:
    empty = torch.zeros(1, 2, dtype=torch.bool)
    nothing = torch.full((1, 2), torch.nan)
    assert sequence_log_ratio(nothing, nothing, empty, None, mean=True).tolist() == [[0, 0]]


class TestEstimates:
    @pytest.mark.parametrize("estimator", ["k1", "k3"])
    def test_their_expectation_is_the_divergence(self, estimator: str) -> None:
        p = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
        q = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
        want = (p * (p / q).log()).sum()
        assert (p * estimate_kl((p / q).log(), estimator)).sum() == pytest.approx(float(want))

    def test_by_hand(self) -> None:
        d = torch.tensor([-0.5, 2.0], dtype=torch.float64)
        assert estimate_kl(d, "k1").tolist() == [-0.5, 2]
        assert estimate_kl(d, "k2").tolist() == [0.125, 2]
        assert estimate_kl(d, "abs").tolist() == [0.5, 2]
        assert estimate_kl(d, "k3").tolist() == pytest.approx([math.exp(0.5) - 1.5, math.exp(-2) + 1])

    def test_k3_keeps_its_digits_near_zero_and_is_finite_far_away(self) -> None:
        d = torch.tensor([1e-4, -1e-4, -1000.0])
        got = estimate_kl(d, "k3")
        assert got[:2].tolist() == pytest.approx([5e-9, 5e-9], rel=2e-3)
        assert got.isfinite().all()

    def test_another_is_refused_by_its_name(self) -> None:
        with pytest.raises(ValueError, match=r"'k4'.*'k1', 'k2', 'k3'"):
            estimate_kl(torch.zeros(1), "k4")
