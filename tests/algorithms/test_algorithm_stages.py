"""The stages against numbers worked out by hand."""

import math
from typing import ClassVar

import pytest
import torch
from torch import nan

from rlprims import advantage, algorithms, losses, rewards
from rlprims.algorithms import LossTerm, assess_groups, estimate_advantages, policy_objective, shape_scores, use

MASK = torch.tensor([[True, True], [True, False]])


def close(actual, expected, **tolerance):
    torch.testing.assert_close(actual, torch.tensor(expected), **tolerance)


class TestPolicyObjective:
    """Ratios 1.5 and 0.5 with A = 1, ratio 1.1 with A = -2; clip 0.2 and 0.28; the fourth token is padding.

    Losses by hand: -1.28 (clipped), -0.5 (the smaller of 0.5 and 0.8), 2.2.
    """

    ratio = torch.tensor([[1.5, 0.5], [1.1, nan]])
    data: ClassVar = {
        "log_probs": ratio.log(),
        "old_log_probs": torch.zeros(2, 2),
        "advantages": torch.tensor([[1.0, 1.0], [-2.0, nan]]),
        "response_mask": MASK,
        "group_ids": torch.tensor([0, 1]),
    }
    algorithm = algorithms.dapo().replace(score_shaping=())

    def objective(self, data=None, **changes):
        return policy_objective(self.algorithm.replace(**changes), data or self.data)

    @pytest.mark.parametrize(
        ("aggregation", "expected"),
        [
            (losses.token_mean, (-1.28 - 0.5 + 2.2) / 3),
            (losses.token_sum, -1.28 - 0.5 + 2.2),
            (losses.seq_mean_token_sum, (-1.78 + 2.2) / 2),
            (losses.seq_mean_token_mean, (-0.89 + 2.2) / 2),
            (use(losses.seq_mean_token_sum_norm, length=10), (-0.178 + 0.22) / 2),
            (losses.prompt_token_mean, (-0.89 + 2.2) / 2),
        ],
    )
    def test_by_hand(self, aggregation, expected):
        close(self.objective(aggregation=aggregation), expected)

    def test_the_kl_term_adds_its_coefficient_times_its_mean(self):
        ref = self.data["log_probs"] - math.log(2)  # k2 is ln(2)^2 / 2 on every token
        term = LossTerm(coefficient=0.5, loss=use(losses.kl, value="k2"))
        with_kl = self.objective({**self.data, "ref_log_probs": ref}, loss_terms=[term])
        close(with_kl - self.objective(), 0.5 * math.log(2) ** 2 / 2)

    def test_the_entropy_term_rewards_entropy(self):
        entropies = torch.tensor([[0.5, 0.7], [0.6, nan]], requires_grad=True)
        term = LossTerm(coefficient=0.01, loss=use(losses.entropy))
        with_bonus = self.objective({**self.data, "entropies": entropies}, loss_terms=[term])
        close(with_bonus - self.objective(), -0.01 * 0.6)
        with_bonus.backward()
        assert (entropies.grad[MASK] < 0).all()  # a step down the loss is a step up in entropy

    def test_terms_add_up(self):
        data = {**self.data, "entropies": torch.ones(2, 2), "ref_log_probs": self.data["log_probs"] - 1}
        kl = LossTerm(coefficient=0.1, loss=use(losses.kl, value="k1"))
        bonus = LossTerm(coefficient=0.2, loss=use(losses.entropy))
        both = self.objective(data, loss_terms=[kl, bonus])
        close(both - self.objective(), 0.1 * 1 - 0.2 * 1)

    def test_missing_data_is_named(self):
        with pytest.raises(ValueError, match=r"losses.kl needs \['ref_log_probs'\]"):
            policy_objective(algorithms.grpo(), self.data)


class TestValueObjective:
    def test_by_hand(self):
        data = {
            "new_values": torch.tensor([[1.0, 2.0], [3.0, nan]]),
            "values": torch.zeros(2, 2),
            "returns": torch.tensor([[0.0, 0.0], [1.0, nan]]),
            "response_mask": MASK,
        }
        ppo = algorithms.ppo().replace(value_loss=use(losses.value, clip=None))
        close(algorithms.value_objective(ppo, data), (0.5 + 2.0 + 2.0) / 3)

    def test_without_a_critic(self):
        with pytest.raises(ValueError, match="grpo has no value_loss"):
            algorithms.value_objective(algorithms.grpo(), {})


class TestShapeScores:
    mask = torch.arange(8) < torch.tensor([2, 6, 8])[:, None]
    data: ClassVar = {"scores": torch.tensor([1.0, 1.0, 0.0]), "response_mask": mask}

    def test_without_shaping_it_is_the_score(self):
        assert shape_scores(algorithms.grpo(), self.data).keys() == {"shaped_scores"}
        close(shape_scores(algorithms.grpo(), self.data)["shaped_scores"], [1.0, 1.0, 0.0])

    def test_a_term_is_added_and_shown(self):
        shaped = shape_scores(algorithms.dapo(max_length=8, buffer_length=4), self.data)
        close(shaped["overlong_penalty"], [0.0, -0.5, -1.0])
        close(shaped["shaped_scores"], [1.0, 0.5, -1.0])

    def test_one_function_may_fill_two_terms(self):
        parts = [use(rewards.overlong_penalty, max_length=8, buffer_length=n) for n in (4, 8)]
        shaped = shape_scores(algorithms.dapo().replace(score_shaping=parts), self.data)
        close(shaped["shaped_scores"], [1.0 - 0.25, 1.0 - 0.5 - 0.75, -2.0])
        close(shaped["overlong_penalty"], [-0.25, -1.25, -2.0])

    def test_the_raw_scores_stay(self):
        shape_scores(algorithms.dapo(max_length=8, buffer_length=4), self.data)
        close(self.data["scores"], [1.0, 1.0, 0.0])


class TestAssessGroups:
    """Four groups of two: mixed, all wrong, all right, and one with a verifier's failure."""

    data: ClassVar = {
        "scores": torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, nan, 1.0]),
        "acc": torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, nan, 1.0]),
        "group_ids": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
    }

    def test_without_a_filter_only_unknown_scores_drop_a_group(self):
        assert assess_groups(algorithms.grpo(), self.data) == [None] * 6 + ["a score is not finite"] * 2

    def test_the_filter_says_what_it_saw(self):
        reasons = assess_groups(algorithms.dapo(), self.data)
        assert reasons[::2] == [None, "acc is 0 throughout", "acc is 1 throughout", "a score is not finite"]
        assert reasons[::2] == reasons[1::2]

    def test_it_looks_at_its_metric_and_not_at_the_score(self):
        data = {**self.data, "scores": torch.arange(8.0)}
        assert (
            assess_groups(algorithms.dapo(), data)[:6]
            == [None] * 2 + ["acc is 0 throughout"] * 2 + ["acc is 1 throughout"] * 2
        )

    def test_an_unknown_metric_is_not_called_constant(self):
        data = {**self.data, "scores": torch.zeros(8)}
        assert assess_groups(algorithms.dapo(), data)[6:] == ["acc does not pass filters.nonzero_range"] * 2

    def test_a_missing_metric_names_the_columns(self):
        with pytest.raises(ValueError, match=r"filter.metric is 'format'; the columns are \['acc', 'group_ids', 'sc"):
            assess_groups(algorithms.dapo(metric="format"), self.data)


class TestEstimateAdvantages:
    """Two responses of two tokens and one token; scores 1 and 0 on their last tokens."""

    data: ClassVar = {
        "shaped_scores": torch.tensor([1.0, 0.0]),
        "response_mask": MASK,
        "group_ids": torch.tensor([0, 0]),
        "values": torch.tensor([[0.5, 0.25], [0.2, nan]]),
        "old_log_probs": torch.tensor([[-1.0, -2.0], [-1.0, nan]]),
        "ref_log_probs": torch.tensor([[-1.5, -1.0], [-3.0, nan]]),
    }

    def test_the_score_stands_on_the_last_token(self):
        estimated = estimate_advantages(algorithms.rloo(), self.data)
        assert estimated.keys() == {"rewards", "advantages"}
        close(estimated["rewards"], [[0.0, 1.0], [0.0, 0.0]])
        close(estimated["advantages"], [[1.0, 1.0], [-1.0, 0.0]])

    def test_returns_are_taken_before_whitening(self):
        estimated = estimate_advantages(algorithms.ppo(lam=1.0), self.data)
        close(estimated["returns"], [[1.0, 1.0], [0.0, 0.0]])  # lambda = 1: the reward to come
        # A = 0.5, 0.75, -0.2: mean 0.35, variance 0.485 / 2
        std = math.sqrt(0.2425)
        close(estimated["advantages"], [[0.15 / std, 0.4 / std], [-0.55 / std, 0.0]])

    def test_whitening_changes_no_return(self):
        plain = estimate_advantages(algorithms.ppo().replace(normalization=None), self.data)
        assert torch.equal(plain["returns"], estimate_advantages(algorithms.ppo(), self.data)["returns"])
        torch.testing.assert_close(
            plain["advantages"] + self.data["values"].nan_to_num() * MASK, plain["returns"], rtol=0, atol=1e-6
        )

    @pytest.mark.parametrize(
        ("estimator", "distances"),
        [("k1", [0.5, -1.0, 2.0]), ("k2", [0.125, 0.5, 2.0]), ("abs", [0.5, 1.0, 2.0])],
    )
    def test_kl_in_the_reward_is_paid_per_token(self, estimator, distances):
        algorithm = algorithms.reinforce().replace(kl_in_reward={"estimator": estimator})
        a, b, c = (0.1 * distance for distance in distances)
        estimated = estimate_advantages(algorithm, self.data, kl_coef=0.1)
        close(estimated["rewards"], [[-a, 1 - b], [-c, 0.0]])
        close(estimated["advantages"], [[1 - a - b, 1 - b], [-c, 0.0]])

    def test_a_coefficient_of_zero_costs_nothing(self):
        algorithm = algorithms.reinforce().replace(kl_in_reward={})
        close(estimate_advantages(algorithm, self.data)["rewards"], [[0.0, 1.0], [0.0, 0.0]])

    def test_no_gradient_leaves(self):
        values = torch.zeros(2, 2, requires_grad=True)
        estimated = estimate_advantages(algorithms.ppo(), {**self.data, "values": values})
        assert not any(tensor.requires_grad for tensor in estimated.values())

    def test_a_strangers_estimator_receives_the_rewards(self):
        def negated(rewards, response_mask):
            return -rewards

        estimated = estimate_advantages(algorithms.reinforce().replace(advantage=negated), self.data)
        close(estimated["advantages"], [[0.0, -1.0], [0.0, 0.0]])

    def test_gae_reads_the_critic(self):
        with pytest.raises(ValueError, match=r"advantage.gae needs \['values'\]"):
            estimate_advantages(
                algorithms.ppo().replace(advantage=advantage.gae),
                {name: tensor for name, tensor in self.data.items() if name != "values"},
            )
