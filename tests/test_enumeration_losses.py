"""What the losses' gradients are, on policies small enough to sum over every response; see test_enumeration."""

import inspect
from collections.abc import Callable
from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

from rlprims import losses
from rlprims.corrections import importance_weights
from rlprims.layout import to_tokens
from rlprims.logprobs import entropy_from_logits
from rlprims.losses import cispo, clipped_surrogate, decoupled_ppo, gspo, kl, negative_entropy, reinforce, weighted_kl
from rlprims.rewards import kl_penalty
from tests.test_enumeration import (
    CLOSE,
    MASK,
    POLICY_GRADIENT,
    REF,
    RESPONSES,
    SCORES,
    THETA,
    VOCAB,
    expected,
    gradient,
    log_probs,
    probabilities,
    random_table,
)

OLD = THETA + 0.4 * random_table(5)
"""The policy at the start of a step, which has since moved to THETA."""
A = to_tokens(SCORES, MASK)
WIDE = {"clip_low": 1.0, "clip_high": 1e9}

Loss = Callable[..., Tensor]


def mean_of(per_token: Tensor, sampler: Tensor) -> Tensor:
    """The expected sum over tokens, for responses of the sampler."""
    return expected(per_token, probabilities(sampler))


def finite_difference(f: Callable[[Tensor], float], theta: Tensor, step: float = 1e-5) -> Tensor:
    def slope(index: int) -> float:
        nudge = torch.zeros(theta.numel(), dtype=theta.dtype)
        nudge[index] = step
        nudge = nudge.view_as(theta)
        return (f(theta + nudge) - f(theta - nudge)) / (2 * step)

    return torch.tensor([slope(index) for index in range(theta.numel())], dtype=theta.dtype).view_as(theta)


def paths(theta: Tensor) -> list[list[float]]:
    """For each response the probabilities of its tokens, as plain numbers."""
    p = theta.softmax(-1).tolist()
    return [[p[state][token] for state, token in zip((0, *y), y, strict=False)] for y in RESPONSES]


def probability(path: list[float]) -> float:
    result = 1.0
    for p in path:
        result *= p
    return result


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


POLICY_LOSSES: dict[str, Loss] = {
    name: getattr(losses, name)
    for name in losses.__all__
    if {"log_probs", "advantages"} <= (taken := set(inspect.signature(getattr(losses, name)).parameters))
    and "group_ids" not in taken
}
"""Those that compare the responses of a group have gradients of their own: see tests/losses/test_group.py."""


class TestOnPolicy:
    def test_the_policy_losses_are_found(self) -> None:
        assert {"reinforce", "clipped_surrogate", "gspo", "cispo", "decoupled_ppo"} <= set(POLICY_LOSSES)

    @pytest.mark.parametrize("name", POLICY_LOSSES)
    def test_every_policy_loss_has_the_policy_gradient(self, name: str) -> None:
        """All on policies equal and one advantage per response, so that a shared ratio is no exception."""
        loss, old = POLICY_LOSSES[name], log_probs(THETA)
        given = {"old_log_probs": old, "rollout_log_probs": old, "advantages": A, "response_mask": MASK}
        given["expert_mask"] = torch.zeros_like(MASK)
        data = {k: v for k, v in given.items() if k in inspect.signature(loss).parameters}
        got = gradient(lambda theta: -mean_of(loss(log_probs(theta), **data), THETA), THETA)
        torch.testing.assert_close(got, POLICY_GRADIENT, **CLOSE)


class TestSurrogates:
    """Off policy, with tokens on both sides of both bounds, against the paper's objective in plain numbers."""

    @staticmethod
    def gradient_of(loss: Loss, **bounds: Any) -> Tensor:
        old = log_probs(OLD)
        return gradient(lambda theta: -mean_of(loss(log_probs(theta), old, A, MASK, **bounds), OLD), THETA)

    @pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.2, None), (0.1, 0.28, None), (0.2, 0.2, 1.05)])
    def test_ppo(self, low: float, high: float, dual: float | None) -> None:
        def objective(theta: Tensor) -> float:
            total = 0.0
            for new, old, a in zip(paths(theta), paths(OLD), SCORES.tolist(), strict=True):
                for p, q in zip(new, old, strict=True):
                    term = min(p / q * a, clip(p / q, 1 - low, 1 + high) * a)
                    total += probability(old) * (max(term, dual * a) if dual is not None and a < 0 else term)
            return total

        bounds = {"clip_low": low, "clip_high": high} | ({} if dual is None else {"dual_clip": dual})
        got = self.gradient_of(clipped_surrogate, **bounds)
        torch.testing.assert_close(got, finite_difference(objective, THETA), rtol=0, atol=1e-9)
        free = self.gradient_of(clipped_surrogate, **WIDE)
        assert (got - free).abs().max() > 0.01  # something was clipped

    @pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.1, 0.1)])
    def test_gspo(self, low: float, high: float) -> None:
        def objective(theta: Tensor) -> float:
            total = 0.0
            for new, old, a in zip(paths(theta), paths(OLD), SCORES.tolist(), strict=True):
                s = (probability(new) / probability(old)) ** (1 / len(new))
                total += probability(old) * len(new) * min(s * a, clip(s, 1 - low, 1 + high) * a)
            return total

        got = self.gradient_of(gspo, clip_low=low, clip_high=high)
        torch.testing.assert_close(got, finite_difference(objective, THETA), rtol=0, atol=1e-9)
        assert (got - self.gradient_of(gspo, **WIDE)).abs().max() > 0.01

    @pytest.mark.parametrize("bound", [0.1, 0.4])
    def test_gspo_of_the_product_is_ppo_whose_action_is_the_response(self, bound: float) -> None:
        def objective(theta: Tensor) -> float:
            total = 0.0
            for new, old, a in zip(paths(theta), paths(OLD), SCORES.tolist(), strict=True):
                s = probability(new) / probability(old)
                total += probability(old) * len(new) * min(s * a, clip(s, 1 - bound, 1 + bound) * a)
            return total

        got = self.gradient_of(gspo, clip_low=bound, clip_high=bound, mean="product")
        torch.testing.assert_close(got, finite_difference(objective, THETA), rtol=0, atol=1e-9)
        assert (got - self.gradient_of(gspo, **WIDE, mean="product")).abs().max() > 0.01

    def test_gspo_unclipped_is_not_the_policy_gradient(self) -> None:
        """A geometric mean is no importance weight: only for responses of one token."""
        assert (self.gradient_of(gspo, **WIDE) - POLICY_GRADIENT).abs().max() > 1e-3

    def test_cispo_is_the_policy_gradient_with_clipped_weights(self) -> None:
        """Its value is no objective: the gradient is compared with Σ p_old clip(ρ) A ∇log π, token by token."""
        want = torch.zeros_like(THETA)
        for y, new, old, a in zip(RESPONSES, paths(THETA), paths(OLD), SCORES.tolist(), strict=True):
            for state, token, p, q in zip((0, *y), y, new, old, strict=False):
                score = -THETA[state].softmax(-1)
                score[token] += 1
                want[state] += probability(old) * clip(p / q, 0.9, 1.1) * a * score
        got = self.gradient_of(cispo, w_min=0.9, w_max=1.1)
        torch.testing.assert_close(got, want, **CLOSE)
        assert (got - self.gradient_of(clipped_surrogate, clip_low=0.1, clip_high=0.1)).abs().max() > 0.01


class TestOffPolicy:
    """Samples of another policy: which weights give back the gradient of the one that is trained."""

    @staticmethod
    def policy_gradient(theta: Tensor) -> Tensor:
        return gradient(lambda t: probabilities(t) @ SCORES, theta)

    def token_gradient(self, sampler: Tensor) -> Tensor:
        """Each state's policy gradient, where the states, and what follows a token, are the sampler's."""
        q = sampler.softmax(-1)
        after = torch.stack([SCORES[[RESPONSES.index((a, b)) for b in range(VOCAB)]] for a in range(1, VOCAB)])
        first = torch.cat([SCORES[:1], (q[1:] * after).sum(-1)])
        return gradient(lambda t: t[0].softmax(-1) @ first + q[0, 1:] @ (t[1:].softmax(-1) * after).sum(-1), THETA)

    @pytest.mark.parametrize("loss", [reinforce, clipped_surrogate, cispo, gspo])
    def test_product_weights_of_whole_responses_give_the_trainers_gradient(self, loss: Loss) -> None:
        old = log_probs(THETA)
        w = importance_weights(old, log_probs(REF), MASK, level="sequence", mean="product", high=torch.inf).values
        data = (A, MASK) if loss is reinforce else (old, A, MASK)
        got = gradient(lambda theta: -mean_of(w * loss(log_probs(theta), *data), REF), THETA)
        torch.testing.assert_close(got, POLICY_GRADIENT, **CLOSE)

    @pytest.mark.parametrize("options", [{"level": "token"}, {"level": "sequence", "mean": "geometric"}])
    def test_other_weights_do_not(self, options: dict[str, str]) -> None:
        w = importance_weights(log_probs(THETA), log_probs(REF), MASK, high=torch.inf, **options).values
        got = gradient(lambda theta: -mean_of(w * reinforce(log_probs(theta), A, MASK), REF), THETA)
        assert (got - POLICY_GRADIENT).abs().max() > 0.01

    def test_a_cap_is_a_bias(self) -> None:
        w = importance_weights(log_probs(THETA), log_probs(REF), MASK, level="sequence", high=1.5).values
        got = gradient(lambda theta: -mean_of(w * reinforce(log_probs(theta), A, MASK), REF), THETA)
        assert (got - POLICY_GRADIENT).abs().max() > 0.01

    def test_product_weights_have_a_mean_of_one_and_a_cap_takes_from_it(self) -> None:
        w = importance_weights(log_probs(THETA), log_probs(REF), MASK, level="sequence", high=torch.inf).values[:, 0]
        assert probabilities(REF) @ w == pytest.approx(1)
        assert (probabilities(REF) @ w.clamp(max=1.5)) < 0.95

    @pytest.mark.parametrize("proximal", [THETA, OLD])
    def test_decoupled_ppo_corrects_each_token_for_the_behaviour_policy(self, proximal: Tensor) -> None:
        """Unclipped, whatever the proximal policy: it cancels. The states remain those of the behaviour policy."""
        old, behaviour = log_probs(proximal), log_probs(REF)
        got = gradient(lambda t: -mean_of(decoupled_ppo(log_probs(t), old, behaviour, A, MASK, **WIDE), REF), THETA)
        torch.testing.assert_close(got, self.token_gradient(REF), **CLOSE)
        assert (got - POLICY_GRADIENT).abs().max() > 0.01

    @pytest.mark.parametrize("proximal", [THETA, OLD])
    def test_decoupled_ppo_of_one_token_is_unbiased(self, proximal: Tensor) -> None:
        mask, scores = torch.ones(VOCAB, 1, dtype=torch.bool), SCORES[:VOCAB]
        old, behaviour = proximal[0].log_softmax(-1)[:, None], REF[0].log_softmax(-1)[:, None]

        def surrogate(x: Tensor) -> Tensor:
            per_token = decoupled_ppo(x.log_softmax(-1)[:, None], old, behaviour, scores[:, None], mask, **WIDE)
            return -expected(per_token, REF[0].softmax(-1))

        want = gradient(lambda x: x.softmax(-1) @ scores, THETA[0])
        torch.testing.assert_close(gradient(surrogate, THETA[0]), want, **CLOSE)

    def test_decoupled_ppo_on_its_own_samples_is_ppo(self) -> None:
        old = log_probs(OLD)
        got = gradient(lambda t: mean_of(decoupled_ppo(log_probs(t), old, old, A, MASK), OLD), THETA)
        want = gradient(lambda t: mean_of(clipped_surrogate(log_probs(t), old, A, MASK), OLD), THETA)
        torch.testing.assert_close(got, want, **CLOSE)


class TestKLPlacements:
    """Where a KL estimate is put, and the gradient that it then has. Per state: visits are the sampler's."""

    @staticmethod
    def visits(sampler: Tensor) -> Tensor:
        return torch.cat([torch.ones(1, dtype=torch.float64), sampler[0].softmax(-1)[1:]])

    def per_state(self, theta: Tensor, sampler: Tensor) -> Tensor:
        log_p, log_q = theta.log_softmax(-1), REF.log_softmax(-1)
        return self.visits(sampler) @ (log_p.exp() * (log_p - log_q)).sum(-1)

    @pytest.mark.parametrize("estimator", ["k1", "k3"])
    @pytest.mark.parametrize("sampler", [THETA, OLD])
    def test_times_the_ratio_with_its_gradient_it_is_the_divergence(self, estimator: str, sampler: Tensor) -> None:
        def loss(theta: Tensor) -> Tensor:
            return mean_of(
                weighted_kl(log_probs(theta), log_probs(sampler), log_probs(REF), MASK, value=estimator), sampler
            )

        torch.testing.assert_close(loss(THETA), self.per_state(THETA, sampler), **CLOSE)
        want = gradient(lambda theta: self.per_state(theta, sampler), THETA)
        torch.testing.assert_close(gradient(loss, THETA), want, **CLOSE)

    @pytest.mark.parametrize("estimator", ["k2", "abs"])
    def test_k2_and_abs_times_the_ratio_are_not(self, estimator: str) -> None:
        def loss(theta: Tensor) -> Tensor:
            return mean_of(weighted_kl(log_probs(theta), log_probs(OLD), log_probs(REF), MASK, value=estimator), OLD)

        want = gradient(lambda theta: self.per_state(theta, OLD), THETA)
        assert (gradient(loss, THETA) - want).abs().max() > 0.01

    def test_k2_times_a_constant_ratio_has_the_gradient_of_the_divergence(self) -> None:
        w = importance_weights(log_probs(THETA), log_probs(OLD), MASK, high=torch.inf).values
        got = gradient(lambda t: mean_of(w * kl(log_probs(t), log_probs(REF), MASK, value="k2"), OLD), THETA)
        torch.testing.assert_close(got, gradient(lambda t: self.per_state(t, OLD), THETA), **CLOSE)

    def test_without_the_ratio_it_is_that_of_another_policy(self) -> None:
        got = gradient(lambda t: mean_of(kl(log_probs(t), log_probs(REF), MASK, value="k2"), OLD), THETA)
        assert (got - gradient(lambda t: self.per_state(t, OLD), THETA)).abs().max() > 1e-3

    @pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
    def test_in_the_reward_only_k1_has_the_gradient_of_the_divergence(self, estimator: str) -> None:
        """One token, so that no return is in play."""
        mask = torch.ones(VOCAB, 1, dtype=torch.bool)
        old, ref = THETA[0].log_softmax(-1)[:, None], REF[0].log_softmax(-1)[:, None]
        rewards = kl_penalty(
            torch.zeros(VOCAB, 1, dtype=torch.float64), old, ref, mask, kl_coef=1.0, estimator=estimator
        )

        def objective(x: Tensor) -> Tensor:
            return -expected(reinforce(x.log_softmax(-1)[:, None], rewards, mask), THETA[0].softmax(-1))

        def divergence(x: Tensor) -> Tensor:
            return -(x.softmax(-1) * (x.log_softmax(-1) - REF[0].log_softmax(-1))).sum()

        apart = (gradient(objective, THETA[0]) - gradient(divergence, THETA[0])).abs().max()
        assert apart < 1e-12 if estimator == "k1" else apart > 0.01

    def test_a_ratio_that_is_a_weight_needs_no_gradient_of_its_own_for_k1_in_the_advantage(self) -> None:
        """k1 as an advantage, −(log π − log q): with the ratio to the sampler it is the divergence, off policy too."""
        advantages = (log_probs(REF) - log_probs(THETA)).where(MASK, 0.0)
        got = gradient(
            lambda t: mean_of(clipped_surrogate(log_probs(t), log_probs(OLD), advantages, MASK, **WIDE), OLD), THETA
        )
        torch.testing.assert_close(got, gradient(lambda t: self.per_state(t, OLD), THETA), **CLOSE)


class TestEntropy:
    STATES = torch.tensor([[0, y[0]] for y in RESPONSES])

    def loss(self, theta: Tensor) -> Tensor:
        return mean_of(negative_entropy(entropy_from_logits(theta[self.STATES]), MASK), THETA)

    def test_the_value_is_the_entropy_of_whole_responses(self) -> None:
        want = sum(probability(path) * log(probability(path)) for path in paths(THETA))
        assert self.loss(THETA).item() == pytest.approx(want, abs=1e-12)

    def test_the_gradient_is_that_of_each_state_with_its_visits_held(self) -> None:
        visits = [1.0, *THETA[0].softmax(-1)[1:].tolist()]

        def objective(theta: Tensor) -> float:
            rows = theta.log_softmax(-1).tolist()
            return sum(d * sum(exp(x) * x for x in row) for d, row in zip(visits, rows, strict=True))

        got = gradient(self.loss, THETA)
        torch.testing.assert_close(got, finite_difference(objective, THETA), rtol=0, atol=1e-9)
        whole = gradient(lambda theta: (probabilities(theta) * probabilities(theta).log()).sum(), THETA)
        assert (got - whole).abs().max() > 0.01

    def test_a_sampled_log_prob_is_no_entropy_bonus(self) -> None:
        """−log π of the sampled token has the entropy as its mean, and no gradient."""
        got = gradient(lambda theta: mean_of(log_probs(theta).where(MASK, 0.0), THETA), THETA)
        torch.testing.assert_close(got, torch.zeros_like(THETA), **CLOSE)
