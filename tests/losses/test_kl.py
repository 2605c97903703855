"""KL estimators: values, gradients, one's value with another's gradient, and weighted samples of an older policy."""

import math

import pytest
import torch
from torch import Tensor

from rlprims.losses import full_kl, kl, weighted_kl
from rlprims.testing import check_loss
from tests.records import SCORE_FUNCTION, Record

LINEAR_IN_LOG_PROBS = {"impossible tokens are finite": "grows with the log-ratio, which is infinite"}
VALUE_AND_GRADIENT_APART = {"gradient is the derivative": "the gradient is asked to be another estimator's"}

RECORDS = [
    Record("losses.kl", check_loss, matters={"value": "k2", "gradient": "k1"}),
    Record("losses.kl", check_loss, call={"value": "k1"}, exempt=LINEAR_IN_LOG_PROBS),
    Record("losses.kl", check_loss, call={"value": "k2"}, exempt=LINEAR_IN_LOG_PROBS),
    Record("losses.kl", check_loss, call={"value": "abs"}, exempt=LINEAR_IN_LOG_PROBS),
    Record(
        "losses.kl",
        check_loss,
        call={"value": "k3", "gradient": "k2"},
        exempt={**LINEAR_IN_LOG_PROBS, **VALUE_AND_GRADIENT_APART},
    ),
    Record("losses.weighted_kl", check_loss, matters={"value": "k1"}),
    Record("losses.weighted_kl", check_loss, call={"value": "k1"}, exempt=SCORE_FUNCTION),
]


def value_and_gradient(difference: float, dtype: torch.dtype = torch.float64, **kind: str) -> tuple[float, float]:
    """At log_probs − ref_log_probs = ``difference``."""
    log_probs = torch.tensor([[difference]], dtype=dtype, requires_grad=True)
    got = kl(log_probs, torch.zeros(1, 1, dtype=dtype), torch.tensor([[True]]), **kind)
    got.sum().backward()
    return got.item(), log_probs.grad.item()


@pytest.mark.parametrize(
    ("kind", "difference", "value", "gradient"),
    [
        ("k1", 0.5, 0.5, 1.0),
        ("k1", -2.0, -2.0, 1.0),
        ("k2", 0.5, 0.125, 0.5),
        ("k2", -2.0, 2.0, -2.0),
        ("abs", 0.5, 0.5, 1.0),
        ("abs", -2.0, 2.0, -1.0),
        ("k3", -1.0, math.e - 2, 1 - math.e),  # 0.71828, -1.71828
        ("k3", 1.0, 1 / math.e, 1 - 1 / math.e),  # 0.36788, 0.63212
        ("k3", -2.5, math.exp(2.5) - 3.5, 1 - math.exp(2.5)),  # 8.6825, -11.182
        ("k3", 0.0, 0.0, 0.0),
    ],
)
def test_values_and_gradients(kind: str, difference: float, value: float, gradient: float) -> None:
    assert value_and_gradient(difference, value=kind) == pytest.approx((value, gradient), abs=1e-12)


def test_small_differences_keep_their_digits_in_float32() -> None:
    for difference in (1e-2, 1e-3, 1e-4):
        got, _ = value_and_gradient(difference, torch.float32, value="k3")
        assert got == pytest.approx(difference**2 / 2 - difference**3 / 6, rel=1e-2 if difference == 1e-4 else 1e-3)


def test_near_zero_k2_and_k3_agree() -> None:
    k2, k3 = (value_and_gradient(1e-3, value=kind) for kind in ("k2", "k3"))
    assert k2 == pytest.approx(k3, rel=1e-3)


def test_the_value_of_one_with_the_gradient_of_another() -> None:
    value, gradient = value_and_gradient(-2.5, value="k3", gradient="k2")
    assert value == pytest.approx(math.exp(2.5) - 1 - 2.5)
    assert gradient == pytest.approx(-2.5)


@pytest.mark.parametrize("gradient", ["k1", "k2", "k3", "abs"])
def test_the_gradient_is_that_of_the_estimator_alone(gradient: str) -> None:
    for difference in (-1.5, 0.5):
        value, slope = value_and_gradient(difference, value="k2", gradient=gradient)
        assert value == pytest.approx(difference**2 / 2)
        assert slope == pytest.approx(value_and_gradient(difference, value=gradient)[1])


def test_far_away_a_straight_through_gradient_still_pulls_back() -> None:
    for difference in (-25.0, -800.0):
        value, gradient = value_and_gradient(difference, value="k3", gradient="k2")
        assert math.isfinite(value)
        assert gradient == difference


def test_an_impossible_token_has_a_finite_value_whatever_the_gradient_is() -> None:
    log_probs = torch.tensor([[-torch.inf, -1.0]])
    got = kl(log_probs, torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, True]]), value="k3", gradient="k2")
    assert got.tolist()[0] == pytest.approx([math.exp(20) - 21, 1 / math.e])


def test_k3_within_the_clamp_keeps_its_gradient_where_peers_have_cut_it() -> None:
    value, gradient = value_and_gradient(-5.0, value="k3")
    assert value == pytest.approx(math.exp(5) - 6) != pytest.approx(10)
    assert gradient == pytest.approx(1 - math.exp(5))


@pytest.mark.parametrize("difference", [-25.0, 25.0, -800.0, 1e4, -math.inf, math.inf])
def test_k3_beyond_the_clamp_is_finite(difference: float) -> None:
    value, gradient = value_and_gradient(difference, value="k3")
    assert 0 <= value < math.inf
    assert math.isfinite(gradient)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="'k4'"):
        value_and_gradient(0.0, value="k4")


class TestWeighted:
    """Four tokens, sampled by an older policy: every expectation is a sum."""

    pi, q, old = torch.tensor(
        [[0.4, -1.0, 0.3, 2.0], [-0.5, 0.2, 1.0, 0.1], [1.0, 0.0, -1.0, 0.5]], dtype=torch.float64
    )
    mask = torch.ones(4, 1, dtype=torch.bool)

    def expected(self, logits: Tensor, old: Tensor, **kind: str) -> Tensor:
        log_probs = (x.log_softmax(-1)[:, None] for x in (logits, old, self.q))
        return (weighted_kl(*log_probs, self.mask, **kind)[:, 0] * old.softmax(-1)).sum()

    def exact(self, logits: Tensor) -> Tensor:
        return full_kl(logits[None, None], self.q[None, None], self.mask[:1]).sum()

    @staticmethod
    def gradient(f, x: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(leaf), leaf)
        return g

    @pytest.mark.parametrize("kind", ["k1", "k3"])
    @pytest.mark.parametrize("old", [old, pi], ids=["off policy", "on policy"])
    def test_k1_and_k3_have_the_value_and_the_gradient_of_the_divergence(self, kind: str, old: Tensor) -> None:
        close = {"rtol": 0, "atol": 1e-12}
        torch.testing.assert_close(self.expected(self.pi, old, value=kind), self.exact(self.pi), **close)
        got = self.gradient(lambda x: self.expected(x, old, value=kind), self.pi)
        torch.testing.assert_close(got, self.gradient(self.exact, self.pi), **close)

    def test_k2_has_neither(self) -> None:
        assert abs(self.expected(self.pi, self.old, value="k2") - self.exact(self.pi)) > 0.01
        got = self.gradient(lambda x: self.expected(x, self.old, value="k2"), self.pi)
        assert (got - self.gradient(self.exact, self.pi)).abs().max() > 0.01

    def test_without_weights_older_samples_mislead(self) -> None:
        def unweighted(logits: Tensor) -> Tensor:
            per_token = kl(logits.log_softmax(-1)[:, None], self.q.log_softmax(-1)[:, None], self.mask, gradient="k2")
            return (per_token[:, 0] * self.old.softmax(-1)).sum()

        assert (self.gradient(unweighted, self.pi) - self.gradient(self.exact, self.pi)).abs().max() > 0.01

    def test_one_token_by_hand(self) -> None:
        """ρ = 2, and the reference has twice the probability: the gradient is ρ k3 + ρ k3'."""
        now, then, ref = torch.tensor([[0.4, 0.2, 0.8]], dtype=torch.float64).log().T
        now.requires_grad_()
        loss = weighted_kl(now[:, None], then[:, None], ref[:, None], self.mask[:1])
        loss.sum().backward()
        k3 = 2 - 1 - math.log(2)
        assert loss.item() == pytest.approx(2 * k3)
        assert now.grad.item() == pytest.approx(2 * k3 + 2 * (1 - 2))
