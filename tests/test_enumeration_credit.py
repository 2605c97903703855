"""Estimators finer than a response, on tabular policies whose every outcome is summed over."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from rlprims.advantage import gigpo, grpo, prime, rtmc, tree_grpo, turn_grpo, vineppo
from rlprims.losses import reinforce
from rlprims.rewards import at_last_token
from tests.test_enumeration import (
    CLOSE,
    MASK,
    POLICY_GRADIENT,
    RESPONSES,
    SCORES,
    STATES,
    THETA,
    TOKENS,
    VOCAB,
    Groups,
    expected,
    gradient,
    log_probs,
    of,
    probabilities,
)

STEPS = torch.tensor([0, 1]).expand(STATES.shape)


class TestVine:
    """Every token is a step. A continuation from the prompt is any response, one after the token a any token."""

    def gradient(self, continuations: int) -> Tensor:
        """The expected gradient over responses and over all draws of K continuations at each of their states."""
        total = torch.zeros_like(THETA)
        p, after = probabilities(THETA), THETA.softmax(-1)
        for draw in itertools.product(range(len(RESPONSES)), repeat=continuations):
            first = SCORES[list(draw)].mean()
            for tokens in itertools.product(range(VOCAB), repeat=continuations):
                # The value of each state a, by the drawn continuations, and how likely these draws are after a.
                value = torch.zeros(VOCAB, dtype=torch.float64)
                chance = torch.ones(VOCAB, dtype=torch.float64)
                for a in range(1, VOCAB):
                    value[a] = SCORES[[RESPONSES.index((a, b)) for b in tokens]].mean()
                    chance[a] = after[a, list(tokens)].prod()
                chance[0] = VOCAB**-continuations  # a response of one token has no second state
                values = torch.stack([first.expand(len(RESPONSES)), value[STATES[:, 1]]], 1)
                advantages = vineppo(at_last_token(SCORES, MASK), values, STEPS, MASK)
                weights = p * p[list(draw)].prod() * chance[STATES[:, 1]]
                surrogate = partial(self.surrogate, advantages, weights)
                total = total + gradient(surrogate, THETA)
        return total

    @staticmethod
    def surrogate(advantages: Tensor, weights: Tensor, theta: Tensor) -> Tensor:
        return -expected(reinforce(log_probs(theta), advantages, MASK), weights)

    @pytest.mark.parametrize("continuations", [1, 2])
    def test_it_is_unbiased_for_any_number_of_continuations(self, continuations: int) -> None:
        torch.testing.assert_close(self.gradient(continuations), POLICY_GRADIENT, **CLOSE)


class TestTree:
    """Two trees of two leaves: a first token each, and two draws of what follows it."""

    M, N = 2, 2

    def gradient(self, estimator: Callable[..., Tensor]) -> Tensor:
        """The expected gradient of Σ_t A_t log π_t, averaged over the leaves."""
        table = THETA.log_softmax(-1)
        trees, chances = [], []
        for a in range(VOCAB):
            branches = [(a,)] if a == 0 else [(a, b) for b in range(VOCAB)]
            for leaves in itertools.product(branches, repeat=self.N):
                trees.append([RESPONSES.index(leaf) for leaf in leaves])
                chances.append(float((table[0, a] + sum(table[a, leaf[1]] for leaf in leaves if a)).exp()))
        forests = list(itertools.product(range(len(trees)), repeat=self.M))
        rows = torch.tensor([leaf for forest in forests for t in forest for leaf in trees[t]])
        count = self.M * self.N
        group_ids = torch.arange(len(forests)).repeat_interleave(count)
        tree_ids = torch.arange(self.M).repeat_interleave(self.N).repeat(len(forests))
        weights = torch.tensor([chances[a] * chances[b] for a, b in forests], dtype=torch.float64)
        assert weights.sum() == pytest.approx(1)
        advantages = estimator(at_last_token(SCORES[rows], MASK[rows]), group_ids, tree_ids, MASK[rows])
        weights = weights.repeat_interleave(count) / count
        return gradient(
            lambda theta: -expected(reinforce(log_probs(theta)[rows], advantages, MASK[rows]), weights), THETA
        )

    def test_beginnings_and_branches_get_their_shares_of_the_policy_gradient(self) -> None:
        got = self.gradient(partial(tree_grpo, normalize_std=False))
        m, n = self.M, self.N
        share = torch.tensor([(m - 1) / m, *[(m * n - 1) / (m * n) + (n - 1) / n] * 2], dtype=torch.float64)
        torch.testing.assert_close(got, share[:, None] * POLICY_GRADIENT, **CLOSE)

    def test_inside_a_tree_only_the_branches_learn(self) -> None:
        def intra(rewards: Tensor, group_ids: Tensor, tree_ids: Tensor, mask: Tensor) -> Tensor:
            both = tree_grpo(rewards, group_ids, tree_ids, mask, normalize_std=False)
            return both - grpo(rewards, group_ids, mask, normalize_std=False)

        share = torch.tensor([0, *[(self.N - 1) / self.N] * 2], dtype=torch.float64)
        torch.testing.assert_close(self.gradient(intra), share[:, None] * POLICY_GRADIENT, **CLOSE)


@pytest.mark.parametrize("n", [2, 3])
def test_the_mean_over_an_action_has_the_gradient_of_its_returns(n: int) -> None:
    """Where an action is a token, Σ over its visits of Q(s, a) is Σ of their returns: RTMC's is GiGPO's gradient."""
    plain = {"gamma": 1.0}
    got = Groups(n).gradient(partial(rtmc, prior=0.0, **plain), STEPS, STATES, TOKENS)
    both = Groups(n).gradient(partial(gigpo, normalize_std=False, **plain), STEPS, STATES)
    torch.testing.assert_close(got, both - (n - 1) / n * POLICY_GRADIENT, **CLOSE)


def test_a_heavy_prior_makes_of_rtmc_the_comparison_of_episodes() -> None:
    """V' is the mean of the group then, and Q still sums to the returns: GRPO without deviations."""
    got = Groups(2).gradient(partial(rtmc, gamma=1.0, prior=1e12), STEPS, STATES, TOKENS)
    torch.testing.assert_close(got, POLICY_GRADIENT / 2, rtol=0, atol=1e-9)


PROCESS = torch.randn(7, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
PROCESS[:, 0] = PROCESS[:, 0][STATES[:, 1]]  # the first reward knows only the first token


@pytest.mark.parametrize("n", [2, 3])
def test_prime_is_the_gradient_of_outcome_and_process_rewards_less_a_price_of_length(n: int) -> None:
    def estimator(rewards: Tensor, group_ids: Tensor, process: Tensor, mask: Tensor) -> Tensor:
        return prime(rewards, process, group_ids, mask, process_weight=0.7)

    lengths = MASK.sum(-1)
    total = torch.where(MASK, PROCESS, 0.0).sum(-1)
    price = probabilities(THETA) @ (total / lengths)
    want = gradient(lambda theta: probabilities(theta) @ (SCORES + 0.7 * (total - price * lengths)), THETA)
    torch.testing.assert_close(Groups(n).gradient(estimator, PROCESS), want, **CLOSE)


class TestTurns:
    """A policy of two tokens, each a turn, that always takes both: rewards of turns beside the outcome."""

    theta = torch.randn(3, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    tokens = torch.tensor(list(itertools.product(range(2), repeat=2)))
    outcomes = torch.randn(4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    earned = torch.randn(4, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    earned[:, 0] = earned[[0, 0, 2, 2], 0]  # the first turn's reward knows only the first token

    def log_probs(self, theta: Tensor) -> Tensor:
        table = theta.log_softmax(-1)
        return torch.stack([table[0, self.tokens[:, 0]], table[1 + self.tokens[:, 0], self.tokens[:, 1]]], 1)

    @pytest.mark.parametrize("weight", [0.0, 1.0, 0.5])
    @pytest.mark.parametrize("n", [2, 3])
    def test_it_is_the_gradient_of_the_outcome_and_of_what_turns_earn(self, weight: float, n: int) -> None:
        groups = torch.tensor(list(itertools.product(range(4), repeat=n)))
        rows, mask = groups.flatten(), torch.ones(groups.numel(), 2, dtype=torch.bool)
        ids = torch.arange(len(groups)).repeat_interleave(n)
        turns = torch.tensor([0, 1]).expand(mask.shape)
        rewards = at_last_token(self.outcomes[rows], mask)
        advantages = turn_grpo(rewards, self.earned[rows], ids, turns, mask, turn_weight=weight, normalize_std=False)
        p = self.log_probs(self.theta).sum(-1).exp()
        weights = p[groups].prod(-1).repeat_interleave(n) / n
        got = gradient(
            lambda theta: -expected(reinforce(self.log_probs(theta)[rows], advantages, mask), weights), self.theta
        )
        worth = self.outcomes + weight * self.earned.sum(-1)
        want = gradient(lambda theta: self.log_probs(theta).sum(-1).exp() @ worth, self.theta)
        torch.testing.assert_close(got, (n - 1) / n * want, **CLOSE)


def test_the_expected_gradient_is_of_responses() -> None:
    """What the tests above are compared with: REINFORCE without any of it."""
    torch.testing.assert_close(of(torch.where(MASK, SCORES[:, None], 0.0)), POLICY_GRADIENT, **CLOSE)
