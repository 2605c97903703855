"""Tabular policies small enough to sum over every response: expectations are exact, and nothing is sampled.

Token 0 ends a response. With V = 3 and two positions there are 7 responses, of one or two tokens: (0), (1, 0), ...
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from rlprims.advantage import (
    discounted_returns,
    gae,
    gigpo,
    gpg,
    grpo,
    length_adaptive_gae,
    maxrl,
    opo,
    optimal_token_baseline,
    pass_at_k_training,
    pkpo,
    quantile_baseline,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    td_lambda,
    vtrace,
    vtrace_returns,
)
from rlprims.logprobs import from_logits
from rlprims.losses import clipped_surrogate, kl, reinforce, token_sum
from rlprims.rewards import at_last_token, kl_penalty
from rlprims.types import SamplingSupport

VOCAB = 3
RESPONSES = [(0,), *((a, b) for a in range(1, VOCAB) for b in range(VOCAB))]
TOKENS = torch.tensor([[*y, *[0] * (2 - len(y))] for y in RESPONSES])
STATES = torch.tensor([[0, y[0]] for y in RESPONSES])  # 0: the prompt; a: after the first token a
MASK = torch.tensor([[True, len(y) > 1] for y in RESPONSES])
SCORES = torch.tensor([1.0, -0.5, 2.0, 0.3, 0.0, 4.0, -1.0], dtype=torch.float64)
PASSED = (SCORES > 0.5).double()
CLOSE = {"rtol": 0, "atol": 1e-12}


def random_table(seed: int) -> Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_probs(theta: Tensor) -> Tensor:
    """(responses, 2): each token's log-prob; NaN where there is none, for the primitives to ignore."""
    selected = theta.log_softmax(-1)[STATES, TOKENS]
    return torch.where(MASK, selected, torch.nan)


def probabilities(theta: Tensor) -> Tensor:
    return theta.log_softmax(-1)[STATES, TOKENS].where(MASK, 0.0).sum(-1).exp()


def gradient(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    leaf = theta.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(leaf), leaf)
    return g


THETA = random_table(0)
REF = random_table(1)
POLICY_GRADIENT = gradient(lambda theta: probabilities(theta) @ SCORES, THETA)
WRONG = torch.tensor([5.0, -2.0, 1.0], dtype=torch.float64)[STATES]
"""Values of no policy."""


def expected(per_token: Tensor, weights: Tensor) -> Tensor:
    """Σ over responses, each by its fixed probability, of the sum over its tokens."""
    return token_sum(per_token * weights.detach()[:, None], torch.ones_like(per_token, dtype=torch.bool))


@dataclass(frozen=True)
class Groups:
    """Every group of n responses, as one batch, with its probability."""

    n: int
    scores: Tensor = SCORES

    @property
    def members(self) -> Tensor:
        return torch.tensor(list(product(range(len(RESPONSES)), repeat=self.n)))

    def expectation(self, f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
        """E[f] of the members' (groups, n) numbers."""
        return probabilities(theta)[self.members].prod(-1) @ f(self.members)

    def gradient(self, estimator: Callable[..., Tensor], *more: Tensor) -> Tensor:
        """The expected gradient of Σ_t A_t log π_t, averaged over the members of a group.

        ``more`` are data of the responses that the estimator takes between the groups and the mask.
        """
        members = self.members
        rows = members.flatten()
        group_ids = torch.arange(len(members)).repeat_interleave(self.n)
        rewards = at_last_token(self.scores[rows], MASK[rows])
        advantages = estimator(rewards, group_ids, *(x[rows] for x in more), MASK[rows])
        weights = probabilities(THETA)[members].prod(-1).repeat_interleave(self.n) / self.n
        return gradient(
            lambda theta: -expected(reinforce(log_probs(theta)[rows], advantages, MASK[rows]), weights), THETA
        )


def of(advantages: Tensor) -> Tensor:
    """The expected gradient of Σ_t A_t log π_t over single responses."""
    weights = probabilities(THETA)
    return gradient(lambda theta: -expected(reinforce(log_probs(theta), advantages, MASK), weights), THETA)


def test_the_responses_are_all_there_is() -> None:
    assert probabilities(THETA).sum() == pytest.approx(1)


class TestPolicyGradients:
    def test_reinforce_is_unbiased(self) -> None:
        advantages = discounted_returns(at_last_token(SCORES, MASK), MASK)
        torch.testing.assert_close(of(advantages), POLICY_GRADIENT, **CLOSE)

    def test_reinforce_with_rewards_along_the_way_is_unbiased(self) -> None:
        rewards = torch.randn(7, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        rewards[:, 0] = rewards[:, 0][STATES[:, 1]]  # the first reward knows only the first token
        total = torch.where(MASK, rewards, 0.0).sum(-1)
        want = gradient(lambda theta: probabilities(theta) @ total, THETA)
        torch.testing.assert_close(of(discounted_returns(rewards, MASK)), want, **CLOSE)

    @pytest.mark.parametrize("baseline", [0.0, 4.0, -100.0])
    def test_remax_is_unbiased_for_any_baseline(self, baseline: float) -> None:
        scores = torch.full((7,), baseline, dtype=torch.float64)
        torch.testing.assert_close(of(remax(at_last_token(SCORES, MASK), scores, MASK)), POLICY_GRADIENT, **CLOSE)

    @pytest.mark.parametrize("n", [2, 3])
    def test_leave_one_out_is_unbiased(self, n: int) -> None:
        torch.testing.assert_close(Groups(n).gradient(rloo), POLICY_GRADIENT, **CLOSE)

    @pytest.mark.parametrize("n", [2, 3])
    def test_centring_on_a_mean_that_has_oneself_in_it_shrinks_by_one_part_in_n(self, n: int) -> None:
        got = Groups(n).gradient(lambda *batch: grpo(*batch, normalize_std=False))
        torch.testing.assert_close(got, (n - 1) / n * POLICY_GRADIENT, **CLOSE)

    @pytest.mark.parametrize("keep", [2, 3])
    def test_a_part_of_three_equally_long_responses_has_its_part_of_the_gradient(self, keep: int) -> None:
        """GFPO then compares the first ones: k of n have a gradient, shrunk by one part in k."""

        def gfpo(rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
            return grpo(rewards, group_ids, torch.ones_like(mask), normalize_std=False, keep=keep)

        torch.testing.assert_close(Groups(3).gradient(gfpo), (keep - 1) / 3 * POLICY_GRADIENT, **CLOSE)

    @pytest.mark.parametrize("n", [2, 3])
    @pytest.mark.parametrize(
        ("estimator", "baseline"),
        [
            (opo, lambda s, length: (length * s).sum(-1) / length.sum(-1)),
            (partial(quantile_baseline, level=0.3, normalize_std=False), lambda s, length: s.min(-1).values),
            (partial(quantile_baseline, level=1.0, normalize_std=False), lambda s, length: s.max(-1).values),
        ],
        ids=["weighted by length", "smallest", "largest"],
    )
    def test_a_baseline_that_a_group_shares_costs_one_part_in_n_of_its_own_gradient(
        self, estimator: Callable[..., Tensor], baseline: Callable[[Tensor, Tensor], Tensor], n: int
    ) -> None:
        """Σ_i ∇ log π_i is the score of the whole group, so that (1/n) E[b Σ_i ∇ log π_i] = ∇E[b] / n."""
        groups, lengths = Groups(n), MASK.sum(-1).double()
        bias = gradient(lambda theta: groups.expectation(lambda m: baseline(SCORES[m], lengths[m]), theta), THETA)
        torch.testing.assert_close(groups.gradient(estimator), POLICY_GRADIENT - bias / n, **CLOSE)
        assert bias.abs().max() > 0.01

    def test_a_baseline_per_token_from_oneself_alone_is_none(self) -> None:
        log_pi, energy = log_probs(THETA), torch.ones_like(STATES)
        advantages = optimal_token_baseline(
            at_last_token(SCORES, MASK), torch.arange(7), log_pi, energy.double(), MASK, singleton="raw"
        )
        torch.testing.assert_close(of(advantages), POLICY_GRADIENT, **CLOSE)

    @pytest.mark.parametrize("n", [2, 3])
    def test_gpg_makes_up_for_the_groups_that_say_nothing(self, n: int) -> None:
        """In this batch of every group, 7 of the 7ⁿ are constant: each response with copies of itself."""
        share = 1 - 7 / 7**n
        torch.testing.assert_close(Groups(n).gradient(gpg), (n - 1) / n / share * POLICY_GRADIENT, **CLOSE)

    @pytest.mark.parametrize("n", [2, 3])
    def test_whitening_over_the_batch_keeps_the_direction(self, n: int) -> None:
        """The batch's mean is one more baseline, and its deviation a factor."""
        got = Groups(n).gradient(reinforce_pp_baseline)
        torch.testing.assert_close(got / got.norm(), POLICY_GRADIENT / POLICY_GRADIENT.norm(), **CLOSE)
        got = of(reinforce_pp(at_last_token(SCORES, MASK), MASK))
        torch.testing.assert_close(got / got.norm(), POLICY_GRADIENT / POLICY_GRADIENT.norm(), **CLOSE)

    @pytest.mark.parametrize(
        ("baseline", "n", "k"),
        [
            *product(["leave_one_out_minus_one", "none"], [2, 3], [1, 2]),
            *product(["leave_one_out_minus_one", "none"], [3], [3]),
            *product(["leave_one_out"], [3], [1, 2]),
        ],
    )
    def test_pkpo_is_unbiased_for_the_best_of_k(self, baseline: str, n: int, k: int) -> None:
        best = gradient(lambda theta: Groups(k).expectation(lambda m: SCORES[m].max(-1).values, theta), THETA)
        torch.testing.assert_close(Groups(n).gradient(partial(pkpo, k=k, baseline=baseline)), best, **CLOSE)

    @pytest.mark.parametrize("n", [2, 3])
    def test_the_lead_over_the_second_is_the_gradient_of_the_best_of_n(self, n: int) -> None:
        """The paper sums over the group; we average."""
        best = gradient(lambda theta: Groups(n).expectation(lambda m: SCORES[m].max(-1).values, theta), THETA)
        torch.testing.assert_close(n * Groups(n).gradient(pass_at_k_training), best, **CLOSE)

    @pytest.mark.parametrize("n", [2, 3])
    def test_dividing_by_the_mean_is_the_gradient_of_log_p_cut_off(self, n: int) -> None:
        """log p = −Σ_k (1 − p)^k / k: of n samples the baseline takes one, and n − 1 terms are left."""
        got = Groups(n, PASSED).gradient(partial(maxrl, eps=0.0))

        def cut_off(theta: Tensor) -> Tensor:
            p = probabilities(theta) @ PASSED
            return -sum(((1 - p) ** k / k for k in range(1, n)), torch.zeros(()))

        torch.testing.assert_close(got, gradient(cut_off, THETA), **CLOSE)

    @pytest.mark.parametrize("n", [2, 3])
    @pytest.mark.parametrize("ddof", [0, 1])
    def test_of_rewards_of_0_and_1_a_deviation_only_weighs_the_prompt(self, ddof: int, n: int) -> None:
        """A = (r − q) / σ(q) for the share q that passed; given r, ∇ log π is on average ∇p / p or −∇p / (1 − p)."""
        got = Groups(n, PASSED).gradient(partial(grpo, ddof=ddof, eps=0.0))
        p = float(probabilities(THETA) @ PASSED)
        weight = 0.0
        for right in range(1, n):
            q, chance = right / n, math.comb(n, right) * p**right * (1 - p) ** (n - right)
            weight += chance * (q * (1 - q) / p + (1 - q) * q / (1 - p)) / (q * (1 - q) * n / (n - ddof)) ** 0.5
        torch.testing.assert_close(got, weight * gradient(lambda x: probabilities(x) @ PASSED, THETA), **CLOSE)

    @pytest.mark.parametrize("n", [2, 3])
    def test_steps_from_a_state_are_worth_less_where_few_come(self, n: int) -> None:
        """Of m that come, the mean takes one: over m ~ Binomial(n, q), E[m − 1 if m] / E[m] of the gradient is left."""
        estimator = partial(gigpo, gamma=1.0, normalize_std=False)
        turns = torch.tensor([0, 1]).expand(STATES.shape)
        got = Groups(n).gradient(estimator, turns, STATES) - (n - 1) / n * POLICY_GRADIENT
        visited = torch.cat([torch.ones(1, dtype=torch.float64), THETA[0].softmax(-1)[1:]])
        left = 1 - (1 - (1 - visited) ** n) / (n * visited)
        torch.testing.assert_close(got, left[:, None] * POLICY_GRADIENT, **CLOSE)

    def test_dividing_by_the_deviation_turns_the_gradient(self) -> None:
        got = Groups(2).gradient(grpo)
        cosine = torch.cosine_similarity(got.flatten(), POLICY_GRADIENT.flatten(), dim=0)
        assert 0 < cosine < 0.99

    def test_on_policy_the_clipped_surrogate_is_the_policy_gradient(self) -> None:
        advantages = discounted_returns(at_last_token(SCORES, MASK), MASK)
        old, weights = log_probs(THETA), probabilities(THETA)
        got = gradient(
            lambda theta: -expected(clipped_surrogate(log_probs(theta), old, advantages, MASK), weights), THETA
        )
        torch.testing.assert_close(got, POLICY_GRADIENT, **CLOSE)

    def test_off_policy_an_unclipped_ratio_corrects_the_last_step(self) -> None:
        """A one-token policy: the old policy samples, and the ratio makes the gradient that of the new one."""
        old, scores = REF[0].softmax(-1), SCORES[:VOCAB]
        mask = torch.ones(VOCAB, 1, dtype=torch.bool)

        def surrogate(theta: Tensor) -> Tensor:
            new = theta.log_softmax(-1)[:, None]
            wide = clipped_surrogate(new, old.log()[:, None], scores[:, None], mask, clip_low=1.0, clip_high=1e9)
            return -expected(wide, old)

        want = gradient(lambda theta: theta.softmax(-1) @ scores, THETA[0])
        torch.testing.assert_close(gradient(surrogate, THETA[0]), want, **CLOSE)


class TestGAE:
    @staticmethod
    def values(theta: Tensor) -> Tensor:
        """Each state's expected score under the policy."""
        p = theta.softmax(-1)
        after = {a: p[a] @ SCORES[[RESPONSES.index((a, b)) for b in range(VOCAB)]] for a in range(1, VOCAB)}
        first = p[0] @ torch.stack([SCORES[0], *after.values()])
        return torch.stack([torch.stack([first, after.get(int(a), first)]) for a in STATES[:, 1]])

    @pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
    def test_with_the_true_values_it_is_unbiased_for_any_lambda(self, lam: float) -> None:
        advantages = gae(at_last_token(SCORES, MASK), self.values(THETA), MASK, lam=lam)
        torch.testing.assert_close(of(advantages), POLICY_GRADIENT, **CLOSE)

    def test_with_wrong_values_only_lambda_one_is(self) -> None:
        rewards = at_last_token(SCORES, MASK)
        torch.testing.assert_close(of(gae(rewards, WRONG, MASK, lam=1.0)), POLICY_GRADIENT, **CLOSE)
        assert (of(gae(rewards, WRONG, MASK, lam=0.5)) - POLICY_GRADIENT).abs().max() > 0.1

    def test_a_lambda_that_the_first_token_decides_does_no_harm(self) -> None:
        """Here the first token decides the length: λ = 0 for one token, ½ for two."""
        advantages = length_adaptive_gae(at_last_token(SCORES, MASK), self.values(THETA), MASK, alpha=1.0)
        torch.testing.assert_close(of(advantages), POLICY_GRADIENT, **CLOSE)

    @pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
    def test_the_true_values_are_what_lambda_returns_expect(self, lam: float) -> None:
        values = self.values(THETA)
        targets = td_lambda(at_last_token(SCORES, MASK), values, MASK, lam=lam)[:, 0]
        torch.testing.assert_close(probabilities(THETA) @ targets, values[0, 0], **CLOSE)


class TestOffPolicy:
    """Responses of another policy, and values that are wrong."""

    weights = probabilities(REF)
    data = (at_last_token(SCORES, MASK), WRONG, log_probs(THETA), log_probs(REF), MASK)

    def test_without_bounds_the_target_expects_the_value_of_the_policy_that_learns(self) -> None:
        targets = vtrace_returns(*self.data, clip_rho=1e9, clip_c=1e9)[:, 0]
        torch.testing.assert_close(self.weights @ targets, probabilities(THETA) @ SCORES, **CLOSE)

    @pytest.mark.parametrize("bound", [0.5, 1.0, 3.0])
    def test_a_bound_decides_whose_value_is_learned(self, bound: float) -> None:
        """The policy in proportion to min(ρ̄ μ, π): a critic that knows its values expects no change."""
        between = torch.minimum(bound * REF.softmax(-1), THETA.softmax(-1)).log()
        values = TestGAE.values(between)
        targets = vtrace_returns(self.data[0], values, *self.data[2:], clip_rho=bound, clip_c=0.7)[:, 0]
        torch.testing.assert_close(self.weights @ targets, values[0, 0], **CLOSE)

    def test_without_bounds_the_first_step_has_the_gradient_of_the_policy_that_learns(self) -> None:
        """A token's own ratio is in its advantage; those of the tokens before it, which led to its state, are not."""
        advantages = vtrace(*self.data, clip_rho=1e9, clip_c=1e9, clip_pg_rho=1e9)
        got = gradient(lambda theta: -expected(reinforce(log_probs(theta), advantages, MASK), self.weights), THETA)
        torch.testing.assert_close(got[0], POLICY_GRADIENT[0], **CLOSE)
        came = (self.weights @ (STATES[:, 1:] == torch.arange(1, 3)).double()) / (
            probabilities(THETA) @ (STATES[:, 1:] == torch.arange(1, 3)).double()
        )
        torch.testing.assert_close(got[1:], came[:, None] * POLICY_GRADIENT[1:], **CLOSE)


class TestTruncatedSampling:
    """The sampler draws from the two likeliest tokens of each state: K is fixed, and π_K is the policy that acts."""

    table = THETA / 4  # flatter: each set is some 0.7 of its state
    kept_ids = table.topk(2, dim=-1).indices
    inside = (kept_ids[STATES] == TOKENS[..., None]).any(-1) | ~MASK
    possible = inside.all(-1)  # the responses that can be drawn
    mask = MASK[possible]
    kept = SamplingSupport.from_counts(kept_ids[STATES[possible]][mask].flatten(), 2 * mask)

    def log_probs(self, theta: Tensor, kept: SamplingSupport | None) -> Tensor:
        return from_logits(theta[STATES[self.possible]], TOKENS[self.possible], kept).where(self.mask, torch.nan)

    def of(self, kept: SamplingSupport | None) -> Tensor:
        """The expected gradient of REINFORCE over what is drawn, scored within these sets."""
        advantages = at_last_token(SCORES[self.possible], self.mask)
        advantages = discounted_returns(advantages, self.mask)

        def objective(theta: Tensor) -> Tensor:
            return -expected(
                reinforce(self.log_probs(theta, kept), advantages, self.mask), self.probabilities(self.table)
            )

        return gradient(objective, self.table)

    def probabilities(self, theta: Tensor) -> Tensor:
        """Of each possible response under π_K, from the table and the sets by division."""
        p = theta.softmax(-1)
        mass = p.gather(-1, self.kept_ids).sum(-1, keepdim=True)
        return (p / mass)[STATES[self.possible], TOKENS[self.possible]].where(self.mask, 1.0).prod(-1)

    def test_the_possible_responses_are_all_that_is_drawn(self) -> None:
        assert 1 < int(self.possible.sum()) < len(RESPONSES)
        assert float(self.probabilities(self.table).sum()) == pytest.approx(1)

    def test_reinforce_within_the_sets_is_unbiased(self) -> None:
        want = gradient(lambda theta: self.probabilities(theta) @ SCORES[self.possible], self.table)
        torch.testing.assert_close(self.of(self.kept), want, **CLOSE)

    def test_over_the_whole_vocabulary_it_is_biased_by_the_gradient_of_the_kept_mass(self) -> None:
        """log π = log π_K + log S, so what is added is E[score · Σ_t ∇ log S]."""

        def log_mass(theta: Tensor) -> Tensor:
            p = theta.softmax(-1).gather(-1, self.kept_ids).sum(-1)
            per_response = p.log()[STATES[self.possible]].where(self.mask, 0.0).sum(-1)
            return (self.probabilities(self.table) * SCORES[self.possible]).detach() @ per_response

        bias = gradient(log_mass, self.table)
        assert bias.abs().max() > 0.05
        torch.testing.assert_close(self.of(None) - self.of(self.kept), bias, **CLOSE)

    def test_the_mean_ratio_is_one_within_the_sets_alone(self) -> None:
        """Of a policy that has moved since the draw: Σ_y μ_K(y) π_K(y) / μ_K(y) = 1, and less with π."""
        moved = self.table + 0.3 * random_table(7)
        drawn = self.probabilities(self.table)
        old = self.log_probs(self.table, self.kept).where(self.mask, 0.0).sum(-1)
        within, whole = (self.log_probs(moved, kept).where(self.mask, 0.0).sum(-1) for kept in (self.kept, None))
        assert float(drawn @ (within - old).exp()) == pytest.approx(1, abs=1e-12)
        assert float(drawn @ (whole - old).exp()) < 0.9


class TestKL:
    """One position, four tokens: π and q by hand."""

    pi = torch.tensor([0.4, -1.0, 0.3, 2.0], dtype=torch.float64)
    q = torch.tensor([-0.5, 0.2, 1.0, 0.1], dtype=torch.float64).log_softmax(-1)
    mask = torch.ones(4, 1, dtype=torch.bool)

    def divergence(self, logits: Tensor) -> Tensor:
        log_p = logits.log_softmax(-1)
        return (log_p.exp() * (log_p - self.q)).sum()

    def reverse(self, logits: Tensor) -> Tensor:
        return (self.q.exp() * (self.q - logits.log_softmax(-1))).sum()

    def loss(self, logits: Tensor, **kind: str) -> Tensor:
        per_token = kl(logits.log_softmax(-1)[:, None], self.q[:, None], self.mask, **kind)
        return expected(per_token, self.pi.softmax(-1))

    @pytest.mark.parametrize("kind", ["k1", "k3"])
    def test_k1_and_k3_have_the_value_of_the_divergence(self, kind: str) -> None:
        torch.testing.assert_close(self.loss(self.pi, value=kind), self.divergence(self.pi), **CLOSE)

    def test_the_gradient_of_k1_is_zero(self) -> None:
        got = gradient(lambda x: self.loss(x, value="k1"), self.pi)
        torch.testing.assert_close(got, torch.zeros(4, dtype=torch.float64), **CLOSE)

    def test_the_gradient_of_k2_is_that_of_the_divergence(self) -> None:
        got = gradient(lambda x: self.loss(x, value="k2"), self.pi)
        torch.testing.assert_close(got, gradient(self.divergence, self.pi), **CLOSE)

    def test_the_gradient_of_k3_is_that_of_the_other_direction(self) -> None:
        got = gradient(lambda x: self.loss(x, value="k3"), self.pi)
        torch.testing.assert_close(got, gradient(self.reverse, self.pi), **CLOSE)
        assert (got - gradient(self.divergence, self.pi)).abs().max() > 0.05

    def test_k3_through_k2_has_the_value_and_the_gradient_of_the_divergence(self) -> None:
        torch.testing.assert_close(self.loss(self.pi, value="k3", gradient="k2"), self.divergence(self.pi), **CLOSE)
        got = gradient(lambda x: self.loss(x, value="k3", gradient="k2"), self.pi)
        torch.testing.assert_close(got, gradient(self.divergence, self.pi), **CLOSE)

    def test_k1_in_the_reward_has_the_gradient_of_the_divergence_of_whole_responses(self) -> None:
        old, ref = log_probs(THETA), log_probs(REF)
        rewards = kl_penalty(torch.zeros_like(old), old, ref, MASK, kl_coef=0.7, estimator="k1")

        def divergence(theta: Tensor) -> Tensor:
            p = probabilities(theta)
            return (p * (p.log() - probabilities(REF).log())).sum()

        got = of(discounted_returns(rewards, MASK))
        torch.testing.assert_close(got, -0.7 * gradient(divergence, THETA), **CLOSE)

    def test_k2_per_token_leaves_out_what_a_token_does_to_the_states_that_follow(self) -> None:
        """Over two positions: the gradient of each state's divergence, visits held fixed, not that of the whole."""
        p = THETA.softmax(-1)
        visits = torch.stack([torch.ones((), dtype=torch.float64), p[0, 1], p[0, 2]])

        def per_state(theta: Tensor) -> Tensor:
            log_p, log_q = theta.log_softmax(-1), REF.log_softmax(-1)
            return visits @ (log_p.exp() * (log_p - log_q)).sum(-1)

        weights = probabilities(THETA)
        got = gradient(lambda theta: expected(kl(log_probs(theta), log_probs(REF), MASK, value="k2"), weights), THETA)
        torch.testing.assert_close(got, gradient(per_state, THETA), **CLOSE)
