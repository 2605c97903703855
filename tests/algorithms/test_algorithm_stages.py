"""The stages against numbers worked out by hand."""

import math
from typing import ClassVar

import pytest
import torch
from torch import nan

from rlprims import advantage, algorithms, corrections, filters, losses, rewards
from rlprims.algorithms import (
    LossTerm,
    component_scores,
    estimate_advantages,
    filter_groups,
    policy_objective,
    shape_scores,
    token_weights,
    use,
)
from rlprims.ended import Ended
from rlprims.types import Totals

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
        term = LossTerm(coefficient=0.01, loss=use(losses.negative_entropy))
        with_bonus = self.objective({**self.data, "entropies": entropies}, loss_terms=[term])
        close(with_bonus - self.objective(), -0.01 * 0.6)
        with_bonus.backward()
        assert (entropies.grad[MASK] < 0).all()  # a step down the loss is a step up in entropy

    def test_terms_add_up(self):
        data = {**self.data, "entropies": torch.ones(2, 2), "ref_log_probs": self.data["log_probs"] - 1}
        kl = LossTerm(coefficient=0.1, loss=use(losses.kl, value="k1"))
        bonus = LossTerm(coefficient=0.2, loss=use(losses.negative_entropy))
        both = self.objective(data, loss_terms=[kl, bonus])
        close(both - self.objective(), 0.1 * 1 - 0.2 * 1)

    def test_missing_data_is_named(self):
        with pytest.raises(ValueError, match=r"losses.kl: expected \['ref_log_probs'\]"):
            policy_objective(algorithms.grpo(), self.data)


def weights_of(trainer, sampler):
    """Log-probs whose importance weights are trainer / sampler."""
    return {"old_log_probs": torch.tensor(trainer).log(), "rollout_log_probs": torch.tensor(sampler).log()}


class TestWeighTokens:
    """On policy, so that the loss of a token is −A: −1, −1 and 2; the fourth token is padding."""

    data: ClassVar = {
        **weights_of([[0.8, 0.2], [0.3, nan]], [[0.4, 0.4], [0.2, nan]]),  # weights 2, 1/2 and 3/2
        "log_probs": torch.tensor([[0.8, 0.2], [0.3, nan]]).log(),
        "ref_log_probs": torch.tensor([[0.8, 0.2], [0.3, nan]]).log() - 1,
        "entropies": torch.tensor([[0.1, 0.3], [0.2, nan]]),
        "advantages": torch.tensor([[1.0, 1.0], [-2.0, nan]]),
        "response_mask": MASK,
        "scores": torch.tensor([1.0, 0.0]),
        "group_ids": torch.tensor([0, 0]),
    }
    algorithm = algorithms.grpo(kl_coef=0).replace(aggregation=losses.token_sum)
    K1: ClassVar = LossTerm(coefficient=0.1, loss=use(losses.kl, value="k1"))  # 1 on every token

    def objective(self, data=None, **changes):
        algorithm, data = self.algorithm.replace(**changes), data or self.data
        return policy_objective(algorithm, {**data, **token_weights(algorithm, data)})

    def test_nothing_to_weigh_makes_nothing(self):
        assert token_weights(self.algorithm, self.data) == {}
        close(self.objective(), 0.0)

    def test_a_correction_multiplies_the_policy_loss(self):
        close(self.objective(corrections=[corrections.tis]), -2.0 - 0.5 + 3.0)
        close(self.objective(corrections=[use(corrections.tis, high=1.5)]), -1.5 - 0.5 + 3.0)

    def test_and_no_added_term(self):
        close(self.objective(corrections=[corrections.tis], loss_terms=[self.K1]), 0.5 + 0.3)

    def test_gates_multiply_with_a_correction(self):
        gate = use(corrections.rejection, estimator="k1", level="token", low=0.6, high=1.7)
        weighed = token_weights(self.algorithm.replace(corrections=[corrections.tis, gate]), self.data)
        close(weighed["loss_weights"], [[0.0, 0.0], [1.5, 0.0]])

    def test_two_corrections_of_the_same_gap_raise(self):
        twice = self.algorithm.replace(corrections=[corrections.tis, corrections.icepop])
        with pytest.raises(ValueError, match="correcting twice: both factors account for rollout->old"):
            token_weights(twice, self.data)

    def test_a_selection_leaves_the_other_tokens_without_a_policy_loss(self):
        half = use(filters.high_entropy, fraction=0.5)  # the entropies 0.3 and 0.2
        close(self.objective(token_selection=half), -1.0 + 2.0)
        close(self.objective(token_selection=half, loss_terms=[self.K1]), 1.0 + 0.3)
        close(self.objective(token_selection=half, corrections=[corrections.tis]), -0.5 + 3.0)

    def test_a_token_of_weight_0_counts_in_the_mean(self):
        half = use(filters.high_entropy, fraction=0.5)
        close(self.objective(token_selection=half, aggregation=losses.token_mean), 1.0 / 3)

    def test_a_term_on_chosen_tokens(self):
        term = self.K1.model_copy(update={"tokens": use(algorithms.is_correct)})
        close(self.objective(loss_terms=[term]), 0.1 * 2)
        close(self.objective(loss_terms=[self.K1, term]), 0.1 * 3 + 0.1 * 2)
        weighed = token_weights(self.algorithm.replace(loss_terms=[self.K1, term]), self.data)
        assert {name: chosen.tolist() for name, chosen in weighed.items()} == {
            "loss_terms.1.tokens": [[True, True], [False, False]]
        }

    def test_no_gradient_passes_through_a_weight(self):
        log_probs = self.data["log_probs"].nan_to_num().requires_grad_()
        data = {**self.data, "log_probs": log_probs}
        chosen = self.algorithm.replace(corrections=[corrections.tis, use(corrections.opsm, delta=9.0)])
        weighed = token_weights(chosen, data)
        assert not weighed["loss_weights"].requires_grad
        policy_objective(chosen, {**data, **weighed}).backward()
        close(log_probs.grad, [[-2.0, -0.5], [3.0, 0.0]])

    def test_weights_that_were_not_made_are_asked_for(self):
        corrected = self.algorithm.replace(corrections=[corrections.tis])
        with pytest.raises(ValueError, match=r"the batch has no loss_weights: add token_weights\(algorithm, data\)"):
            policy_objective(corrected, self.data)
        restricted = self.algorithm.replace(
            loss_terms=[self.K1.model_copy(update={"tokens": use(algorithms.is_correct)})]
        )
        with pytest.raises(ValueError, match=r"the batch has no loss_terms.0.tokens"):
            policy_objective(restricted, self.data)

    def test_missing_data_is_named(self):
        with pytest.raises(ValueError, match=r"filters.high_entropy: expected \['entropies'\]"):
            token_weights(algorithms.high_entropy(), {"response_mask": MASK})


class TestWeighingAWholeUpdate:
    """64 tokens of 8 responses; half of the candidates of Clip-Cov are drawn."""

    random = torch.Generator().manual_seed(0)
    mask = torch.arange(8) < torch.randint(1, 9, (8, 1), generator=random)
    data: ClassVar = {
        "log_probs": -torch.rand(8, 8, generator=random),
        "old_log_probs": -torch.rand(8, 8, generator=random),
        "rollout_log_probs": -torch.rand(8, 8, generator=random),
        "advantages": torch.randn(8, 8, generator=random),
        "response_mask": mask,
        "group_ids": torch.arange(8) // 2,
    }
    algorithm = algorithms.clip_cov().replace(
        corrections=[corrections.tis],
        token_selection={"fraction": 0.2, "low": -9.0, "high": 9.0},
        loss_terms=algorithms.kl_cov(fraction=0.3).loss_terms,
    )

    def weigh(self, seed):
        return token_weights(self.algorithm, self.data, generator=torch.Generator().manual_seed(seed))

    def test_a_draw_is_the_generators(self):
        drawn = [(self.weigh(seed)["loss_weights"] == 0) & self.mask for seed in (1, 1, 2)]
        assert int(drawn[0].sum()) == int(0.2 * self.mask.sum())
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])

    def test_a_draw_needs_a_generator(self):
        with pytest.raises(ValueError, match="generator"):
            token_weights(self.algorithm, self.data)

    def test_the_parts_of_a_weighed_batch_add_up_to_it(self):
        whole = {**self.data, **self.weigh(1)}
        assert int(whole["loss_terms.0.tokens"].sum()) == math.ceil(0.3 * self.mask.sum())
        totals = Totals(tokens=int(self.mask.sum()), sequences=8, groups=4)
        for cuts in ([3, 5], [2, 2, 4], [1] * 8):
            parts = zip(*(tensor.split(cuts) for tensor in whole.values()), strict=True)
            loss = sum(
                policy_objective(self.algorithm, {**dict(zip(whole, part, strict=True)), "totals": totals})
                for part in parts
            )
            torch.testing.assert_close(loss, policy_objective(self.algorithm, whole), rtol=1e-6, atol=1e-7)

    def test_and_would_not_if_each_part_were_weighed_alone(self):
        halves = [{name: tensor[rows] for name, tensor in self.data.items()} for rows in (slice(4), slice(4, None))]
        chosen = [
            token_weights(self.algorithm, half, generator=torch.Generator().manual_seed(1))["loss_terms.0.tokens"]
            for half in halves
        ]
        assert not torch.equal(torch.cat(chosen), self.weigh(1)["loss_terms.0.tokens"])


class TestComponentScores:
    data: ClassVar = {"correct": torch.tensor([1.0, 0.0]), "format": torch.tensor([0.0, 1.0])}

    def test_columns_in_the_order_of_their_names(self):
        made = component_scores(algorithms.gdpo(components=("format", "correct")), self.data)
        close(made["component_scores"], [[0.0, 1.0], [1.0, 0.0]])

    def test_none_are_named_and_none_are_made(self):
        assert component_scores(algorithms.grpo(), self.data) == {}

    def test_a_column_that_is_not_there(self):
        with pytest.raises(ValueError, match=r"components has \['length'\], expected some of \['correct', 'format'\]"):
            component_scores(algorithms.gdpo(components=("correct", "length")), self.data)

    def test_gdpo_reads_them(self):
        """One leads by the first reward and one by the second: alike, where the sum of scores has nothing to say."""
        gdpo = algorithms.gdpo(weights=(1.0, 0.5))
        data = {
            **component_scores(gdpo, self.data),
            "shaped_scores": torch.ones(2),
            "group_ids": torch.tensor([0, 0]),
            "response_mask": MASK,
        }
        # z = ±√½, weighted 1 − ½: x = ±√½ / 2, whitened over the two: ±√½
        half = math.sqrt(0.5)
        close(estimate_advantages(gdpo, data)["advantages"], [[half, half], [-half, 0.0]], rtol=1e-5, atol=1e-5)


class TestValueObjective:
    def test_by_hand(self):
        data = {
            "new_values": torch.tensor([[1.0, 2.0], [3.0, nan]]),
            "values": torch.zeros(2, 2),
            "returns": torch.tensor([[0.0, 0.0], [1.0, nan]]),
            "response_mask": MASK,
        }
        ppo = algorithms.ppo().replace(value_loss=use(losses.value_loss, clip=None))
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
        assert filter_groups(algorithms.grpo(), self.data) == [None] * 6 + ["a score is not finite"] * 2

    def test_the_filter_says_what_it_saw(self):
        reasons = filter_groups(algorithms.dapo(), self.data)
        assert reasons[::2] == [None, "acc is 0 throughout", "acc is 1 throughout", "a score is not finite"]
        assert reasons[::2] == reasons[1::2]

    def test_it_looks_at_its_metric_and_not_at_the_score(self):
        data = {**self.data, "scores": torch.arange(8.0)}
        assert (
            filter_groups(algorithms.dapo(), data)[:6]
            == [None] * 2 + ["acc is 0 throughout"] * 2 + ["acc is 1 throughout"] * 2
        )

    def test_an_unknown_metric_is_not_called_constant(self):
        data = {**self.data, "scores": torch.zeros(8)}
        assert filter_groups(algorithms.dapo(), data)[6:] == ["acc does not pass filters.varied_scores"] * 2

    def test_a_filter_of_other_columns_has_no_metric(self):
        components = torch.tensor([[1, 0], [0, 1], [1, 1], [1, 1], [1, 0], [1, 0], [1, 0], [0, 1]], dtype=torch.float32)
        data = {"scores": torch.ones(8), "group_ids": self.data["group_ids"], "component_scores": components}
        gdpo = algorithms.gdpo().replace(filter={"keep": filters.varied_components})
        assert filter_groups(gdpo, data)[::2] == [
            None, *["does not pass filters.varied_components"] * 2, None
        ]  # fmt: skip
        complete = algorithms.dapo().replace(filter={"keep": filters.completed_groups})
        data["ended"] = torch.tensor([Ended.STOP] * 5 + [Ended.LENGTH] + [Ended.STOP] * 2)
        assert filter_groups(complete, data)[::2] == [None, None, "does not pass filters.completed_groups", None]

    def test_without_acc_it_looks_at_the_scores(self):
        """A verifier that returns one number: the groups of the DAPO filter are those of a verifier with acc."""
        scores = torch.tensor([1.0, 0.0, 1.0, 1.0])
        data = {"scores": scores, "group_ids": torch.tensor([0, 0, 1, 1])}
        kept = [None, None, "scores is 1 throughout", "scores is 1 throughout"]
        assert filter_groups(algorithms.dapo(), data) == kept
        beside = filter_groups(algorithms.dapo(), {**data, "acc": scores})
        assert beside == [reason and reason.replace("scores", "acc") for reason in kept]

    def test_a_missing_metric_names_the_columns(self):
        with pytest.raises(ValueError, match=r"filter.metric is 'format', expected one of \['acc', 'group_ids', 'sc"):
            filter_groups(algorithms.dapo(metric="format"), self.data)


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

    def test_a_value_target_of_its_own(self):
        """VAPO's critic learns the return; the policy's advantages of one or two tokens are one-step ones."""
        estimated = estimate_advantages(algorithms.vapo().replace(normalization=None), self.data)
        close(estimated["returns"], [[1.0, 1.0], [0.0, 0.0]])
        close(estimated["advantages"], [[0.25 - 0.5, 1 - 0.25], [-0.2, 0.0]])
        other = algorithms.vapo().replace(value_target={"lam": 0.0})
        close(estimate_advantages(other, self.data)["returns"], [[0.25, 1.0], [0.0, 0.0]])

    @pytest.mark.parametrize(
        ("estimator", "distances"),
        [("k1", [0.5, -1.0, 2.0]), ("k2", [0.125, 0.5, 2.0]), ("abs", [0.5, 1.0, 2.0])],
    )
    def test_kl_in_the_reward_is_subtracted_per_token(self, estimator, distances):
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
        with pytest.raises(ValueError, match=r"advantage.gae: expected \['values'\]"):
            estimate_advantages(
                algorithms.ppo().replace(advantage=advantage.gae),
                {name: tensor for name, tensor in self.data.items() if name != "values"},
            )


def test_rewards_of_turns_are_added_where_they_were_earned_unless_they_are_asked_for() -> None:
    mask = torch.tensor([[True, False, True, True], [True, True, False, False]])
    data = {
        "shaped_scores": torch.tensor([1.0, 0.0]),
        "turn_rewards": torch.tensor([[0.5, 9.0, 0.0, 0.25], [0.0, -1.0, 0.0, 0.0]]),
        "turn_ids": torch.tensor([[0, 1, 1, 2], [0, 1, 0, 0]]),
        "group_ids": torch.tensor([0, 0]),
        "response_mask": mask,
    }
    together = estimate_advantages(algorithms.rloo(), data, turns_earn=True)
    assert together["rewards"].tolist() == [[0.5, 0.0, 0.0, 1.25], [0.0, -1.0, 0.0, 0.0]]
    assert together["advantages"][0, 0] == 1.75 - -1.0
    apart = estimate_advantages(algorithms.turn_grpo(), data, turns_earn=True)
    assert apart["rewards"].tolist() == [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
    unread = estimate_advantages(algorithms.rloo(), data)  # a column that nobody asks for
    assert unread["rewards"].tolist() == [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]


def test_ragged_columns_do_not_stand_in_the_way_of_rollouts_of_several_rows() -> None:
    data = {
        "scores": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "group_ids": torch.tensor([0, 0, 0, 1]),
        "trajectory_ids": torch.tensor([0, 0, 1, 2]),
        "response_mask": torch.ones(4, 2, dtype=torch.bool),
        "kept_ids": torch.nested.nested_tensor_from_jagged(torch.arange(3), torch.tensor([0, 1, 1, 3, 3])),
    }
    reasons = filter_groups(algorithms.dapo(), data)
    assert reasons[:3] == [None] * 3
    assert reasons[3] is not None
