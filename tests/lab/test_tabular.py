"""``examples/tabular.py``: exact expectations, and every preset learns."""

import doctest
import math

import pytest
import torch

from examples import tabular
from examples.simulate import simulate
from rlprims import advantage, algorithms, controllers
from rlprims.algorithms import KLInReward, use
from rlprims.ended import Ended


def test_its_examples():
    assert doctest.testmod(tabular) == (0, 9)


def test_a_bandit_s_expectation_by_hand():
    task = tabular.bandit([[0.0, 1.0], [4.0, 2.0]])
    logits = task.uniform()
    logits[0, 0, -1, 1] = math.log(3.0)
    assert task.probabilities(logits).tolist() == [pytest.approx([0.25, 0.75]), pytest.approx([0.5, 0.5])]
    assert float(task.expected_score(logits)) == pytest.approx((0.75 + 3.0) / 2)
    assert task.best_score() == 2.5


def test_probabilities_of_all_responses_add_up_to_one():
    task = tabular.stop_after((1, 3), length=5)
    logits = torch.randn(task.uniform().shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert task.probabilities(logits).sum(-1).tolist() == pytest.approx([1.0, 1.0])
    assert len(task.listed) == len(set(task.listed)) == 6  # 0 to 4 tokens and a stop, or 5 without


def test_the_expected_gradient_of_reinforce_is_that_of_the_expected_score():
    """All responses as one batch, each weighed by its probability: Σ π(y) score(y) ∇ log π(y) = ∇ E[score]."""
    task = tabular.stop_after((2,), length=4)
    logits = torch.randn(task.uniform().shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits.requires_grad_()
    (exact,) = torch.autograd.grad(task.expected_score(logits), logits)
    every = torch.arange(len(task.listed))
    batch = task.batch(logits.detach(), torch.zeros_like(every), every)
    weighed = batch["scores"] * task.probabilities(logits)[0].detach()
    pull = simulate(algorithms.reinforce(), {**batch, "scores": weighed})
    push = torch.zeros(batch["response_mask"].shape, dtype=torch.float64)
    push[pull["row"], pull["position"]] = torch.tensor(pull["gradient"], dtype=torch.float64)
    log_probs = task.log_probs(logits, batch["group_ids"], batch["responses"], batch["response_mask"])
    (found,) = torch.autograd.grad((log_probs * push).sum() * batch["response_mask"].sum(), logits)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)


def test_samples_have_the_numbers_of_the_policy_that_drew_them():
    task = tabular.stop_after((1, 2), length=3)
    sample = task.sample(task.uniform(), 50, torch.Generator().manual_seed(0))
    mask = sample["response_mask"]
    assert sample["group_ids"].tolist() == [0] * 50 + [1] * 50
    torch.testing.assert_close(sample["old_log_probs"], -math.log(2.0) * mask.double())
    torch.testing.assert_close(sample["entropies"], math.log(2.0) * mask.double())
    torch.testing.assert_close(sample["sum_pi_squared"], 0.5 * mask.double())
    right = (mask.sum(-1) == sample["group_ids"] + 2) & (sample["ended"] == Ended.STOP)
    assert torch.equal(sample["scores"] == 1, right)
    assert (sample["ended"] == Ended.LENGTH).any()


TAUGHT = {"iw_opd", "mopd", "opd", "opsd", "rlsd", "sdar", "sdft", "sdpo"}  # a tabular task has no teacher
OWN_COLUMNS = {"gdpo", "prime", "tree_grpo", "turn_grpo", *TAUGHT}
"""Presets that read what only a task with more to tell can give; their tests are below."""


@pytest.mark.parametrize("name", sorted(set(algorithms.PRESETS) - OWN_COLUMNS))
def test_every_preset_learns_the_bandit(name):
    task = tabular.bandit([[0.0, 0.0, 1.0, 0.0]])
    algorithm = algorithms.PRESETS[name]().replace(group_size=16)
    if name == "sft":  # which reads no score: here it imitates what was right
        algorithm = algorithm.replace(token_selection=algorithms.is_correct)
    run = tabular.train(task, algorithm, steps=30, learning_rate=0.2)
    assert run.expected_scores[0] == pytest.approx(0.25)
    assert run.expected_scores[-1] > 0.6


def test_gdpo_learns_two_columns():
    task = tabular.TabularTask(
        lambda prompt, response: {"score": 1.0, "correct": response[0] == 2, "format": response[0] >= 1}, vocabulary=3
    )
    run = tabular.train(task, algorithms.gdpo().replace(group_size=16), steps=30, learning_rate=0.2)
    assert run.expected["correct"][-1] > 0.9


class TwoSteps(tabular.TabularTask):
    """Two tokens of three kinds. Only 2, 1 is right; a reward for the first step alone is earned by a 2."""

    def __init__(self) -> None:
        super().__init__(
            lambda prompt, response: {"score": float(response == (2, 1)), "first": float(response[0] == 2)},
            vocabulary=3,
            length=2,
        )

    def batch(self, logits, prompts, indices):
        batch = super().batch(logits, prompts, indices)
        first = (batch["responses"][:, :1] == 2).double()
        earned = torch.cat([first, torch.zeros_like(first)], 1)
        return {**batch, "turn_rewards": earned, "process_rewards": earned, "tree_ids": batch["responses"][:, 0]}


@pytest.mark.parametrize("name", ["prime", "tree_grpo", "turn_grpo"])
def test_credit_finer_than_a_response_learns_both_steps(name):
    algorithm = algorithms.PRESETS[name]().replace(group_size=16, filter=None)
    run = tabular.train(TwoSteps(), algorithm, steps=60, learning_rate=0.2)
    assert run.expected_scores[0] == pytest.approx(1 / 9)
    assert run.expected_scores[-1] > 0.8


def test_a_reward_for_the_first_turn_is_learned_where_the_outcome_says_nothing():
    """No response is right: the outcome's advantage is 0, and GRPO stands still."""
    task = TwoSteps()
    task.columns["score"] = torch.zeros_like(task.columns["score"])
    runs = [
        tabular.train(task, algorithm.replace(group_size=16), steps=30, learning_rate=0.2)
        for algorithm in (algorithms.turn_grpo(), algorithms.grpo(kl_coef=0.0))
    ]
    assert runs[0].expected["first"][-1] > 0.9
    assert runs[1].expected["first"][-1] == pytest.approx(1 / 3)
    second = runs[0].logits[0, 1].softmax(-1)  # the second step earned nothing, and was not moved
    torch.testing.assert_close(second, torch.full_like(second, 1 / 3))


@pytest.mark.parametrize("estimator", [advantage.rtmc, advantage.gigpo])
def test_states_and_actions_of_a_task_are_compared(estimator):
    algorithm = algorithms.dr_grpo(max_length=6).replace(advantage=estimator, group_size=32)
    run = tabular.train(tabular.stop_after(length=4), algorithm, steps=60, learning_rate=0.2)
    assert run.expected_scores[-1] > run.expected_scores[0] + 0.3


def test_a_critic_learns_what_it_is_to_foretell():
    run = tabular.train(
        tabular.bandit([[3.0, 3.0]]), algorithms.ppo().replace(group_size=8), steps=80, learning_rate=0.2
    )
    assert float(run.values[0, 0, -1]) == pytest.approx(3.0, abs=0.3)


def test_a_heavy_kl_in_the_reward_holds_the_policy_at_its_reference():
    task, free = tabular.bandit([[0.0, 1.0]]), algorithms.reinforce().replace(group_size=64)
    heavy = KLInReward(controller=use(controllers.FixedKL, kl_coef=50.0))
    held = tabular.train(task, free.replace(kl_in_reward=heavy), steps=40)
    assert held.expected_scores[-1] < 0.65 < tabular.train(task, free, steps=40).expected_scores[-1]


def test_training_is_a_function_of_its_seed():
    task = tabular.stop_after()
    runs = [
        tabular.train(task, algorithms.ppo().replace(mini_batches=2, group_size=8), steps=5, seed=s) for s in (3, 3, 4)
    ]
    assert runs[0].expected == runs[1].expected != runs[2].expected
    assert repr(runs[0]).startswith("ppo: expected score 0.156, after 5 steps")


def test_an_algorithm_that_drops_everything_changes_nothing():
    run = tabular.train(tabular.bandit([[1.0, 1.0]]), algorithms.dapo(metric="scores"), steps=3)
    assert run.expected_scores == [1.0] * 4
    assert not run.logits.any()


def test_tabular_task_refuses_too_many_responses():
    with pytest.raises(ValueError, match="100000 responses"):
        tabular.TabularTask(lambda prompt, response: 0.0, vocabulary=10, length=6)
    with pytest.raises(ValueError, match="expected equal lengths"):
        tabular.bandit([[0.0], [0.0, 1.0]])
