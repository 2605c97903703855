"""TRL 1.16 trains a tiny model with its own loss and with ours: the same numbers, step by step."""

from dataclasses import fields

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from examples.trl_trainers import _settings, grpo_trainer, reward_func, rloo_trainer
from rlprims import advantage, algorithms, controllers, losses, rewards
from rlprims.algorithms import KLInReward, LossTerm, use
from rlprims.rewards import verifiers
from tests import tiny
from tests.interop import test_interop_trl

pytestmark = [pytest.mark.peers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS, LENGTH = 20, 8


class Recording:
    """The loss of every backward pass, beside what TRL does."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.seen = []

    def training_step(self, *args):
        loss = super().training_step(*args)
        self.seen.append(loss.item())
        return loss


class Recorded(Recording, GRPOTrainer):
    pass


class RecordedRLOO(Recording, RLOOTrainer):
    pass


def digits(completions, **columns):
    """A score that random responses differ in."""
    return [sum(letter.isdigit() for letter in text) / LENGTH for text in completions]


def spread(completions, **columns):
    return [len(set(text)) / LENGTH for text in completions]


def start():
    return torch.nn.utils.parameters_to_vector(tiny.causal_lm().parameters()).detach()


def train(trainer_class, directory, *, steps=STEPS, reward_funcs=(digits,), **changes):
    """Four micro-batches of eight in two steps of accumulation, each used twice, so the policy leaves the old one."""
    settings = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "max_completion_length": LENGTH,
        "learning_rate": 1e-3,
        "max_steps": steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    config = RLOOConfig if issubclass(trainer_class, RLOOTrainer) else GRPOConfig
    questions = [{"prompt": row["question"], "answer": row["answer"]} for row in tiny.sums(40)]
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(tiny.save_model(directory / "model")),
        reward_funcs=list(reward_funcs),
        args=config(output_dir=str(directory), **settings | changes),
        train_dataset=Dataset.from_list(questions),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    weights = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    return torch.tensor(trainer.seen), weights, trainer


def evaluated(trainer):
    questions = Dataset.from_list([{"prompt": row["question"], "answer": row["answer"]} for row in tiny.sums(4)])
    torch.manual_seed(0)
    return trainer.evaluate(questions)["eval_loss"]


MATCHES = {
    "dapo": (algorithms.dapo(dialect="trl-1.16"), {"epsilon_high": 0.28}),
    "grpo": (algorithms.grpo(dialect="trl-1.16"), {"loss_type": "grpo", "beta": 0.04}),
    "grpo with the plain KL": (
        algorithms.grpo(dialect="trl-1.16").replace(loss_terms=(LossTerm(coefficient=0.04, loss=use(losses.kl)),)),
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    ),
    "dr_grpo": (
        algorithms.dr_grpo(max_length=LENGTH, dialect="trl-1.16"),
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    "gspo": (
        algorithms.gspo(dialect="trl-1.16"),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": (algorithms.cispo(dialect="trl-1.16"), {"loss_type": "cispo", "epsilon_high": 5.0}),
    "gdpo": (
        algorithms.gdpo(components=("digits", "spread"), dialect="trl-1.16"),
        {"multi_objective_aggregation": "normalize_then_sum"},
    ),
}


RLOO = algorithms.rloo(dialect="trl-1.16")
RLOO_MATCHES = {
    "plain": (RLOO, {"beta": 0.0}),
    "with TRL's KL": (RLOO.replace(kl_in_reward=KLInReward(controller=use(controllers.FixedKL, kl_coef=0.05))), {}),
    "narrow": (
        RLOO.replace(policy_loss={"clip_low": 0.01, "clip_high": 0.02}),
        {"beta": 0.0, "epsilon": 0.01, "epsilon_high": 0.02},
    ),
}


@pytest.mark.parametrize("name", MATCHES)
def test_the_same_losses_as_trl(name, tmp_path):
    algorithm, config = MATCHES[name]
    reward_funcs = (digits, spread) if name == "gdpo" else (digits,)
    stock = train(Recorded, tmp_path / "theirs", reward_funcs=reward_funcs, **config)
    check(stock, train(grpo_trainer(algorithm, Recorded), tmp_path / "ours", reward_funcs=reward_funcs, **config))


@pytest.mark.parametrize("name", RLOO_MATCHES)
def test_the_same_losses_as_trls_rloo(name, tmp_path):
    algorithm, config = RLOO_MATCHES[name]
    stock = train(RecordedRLOO, tmp_path / "theirs", **config)
    check(stock, train(rloo_trainer(algorithm, RecordedRLOO), tmp_path / "ours", **config))


def check(stock_run, our_run):
    """Losses, weights and evaluation."""
    theirs, their_weights, stock = stock_run
    ours, our_weights, trainer = our_run
    assert len(theirs) == 2 * STEPS
    assert theirs.abs().max() > 1e-2
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    moved = (their_weights - start()).norm()
    assert (our_weights - their_weights).norm() < 1e-3 * moved
    assert evaluated(trainer) == pytest.approx(evaluated(stock), abs=1e-5)
    assert {"entropy", "approx_kl", "loss"} <= trainer.state.log_history[0].keys()


def test_an_algorithm_is_the_same_in_both_trainers(tmp_path):
    """Denominators over tokens of an optimizer step, in a trainer whose own loss has none."""
    algorithm = algorithms.dapo(dialect="trl-1.16")
    in_grpo = train(grpo_trainer(algorithm, Recorded), tmp_path / "grpo", steps=4)
    in_rloo = train(rloo_trainer(algorithm, RecordedRLOO), tmp_path / "rloo", steps=4, beta=0.0)
    torch.testing.assert_close(in_rloo[0], in_grpo[0], rtol=0, atol=1e-6)
    assert in_grpo[0].abs().max() > 1e-2


def test_another_algorithm_is_one_line(tmp_path):
    """The first step's loss is what the unit tests say of its batch; the runs part."""
    runs = {}
    for estimator in (advantage.grpo, advantage.rloo):
        algorithm = algorithms.dapo(dialect="trl-1.16").replace(advantage=estimator)
        runs[estimator.__name__] = train(grpo_trainer(algorithm, Recorded), tmp_path / estimator.__name__, steps=4)
    assert (runs["grpo"][0] - runs["rloo"][0]).abs().max() > 1e-3
    assert (runs["grpo"][1] - runs["rloo"][1]).norm() > 1e-2 * (runs["grpo"][1] - start()).norm()


def test_advantages_are_those_of_the_algorithm(tmp_path):
    class Seen(Recorded):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            self.batch = output
            return output

    class Ours(grpo_trainer(algorithms.rloo(), Seen)):
        def _generate_and_score_completions(self, inputs):
            self.batch = super()._generate_and_score_completions(inputs)
            return self.batch

    _, _, trainer = train(Ours, tmp_path, steps=1, mask_truncated_completions=True)
    mask = trainer.batch["completion_mask"].bool()
    scores = trainer._rewards[:, 0]
    others = (scores.view(-1, 4).sum(1, keepdim=True) - scores.view(-1, 4)) / 3
    expected = scores - others.flatten()
    assert not mask.any(1).all()  # some were cut, and their scores are in the baseline all the same
    torch.testing.assert_close(trainer.batch["advantages"][mask], (expected[:, None] * mask)[mask])
    assert torch.allclose(torch.tensor(list(trainer._logs["advantages"])), expected)


def test_verifiers_as_reward_functions(tmp_path):
    def half(response, answer):
        """Fails on some rows, which then have no score."""
        return {"score": float(int(answer) % 2), "length": len(response)} if "a" not in response else None

    algorithm = algorithms.dr_grpo(max_length=LENGTH).replace(
        score_shaping=(use(rewards.overlong_penalty, max_length=LENGTH, buffer_length=4),)
    )
    funcs = (reward_func(half), reward_func(verifiers.numeric))
    seen, _, trainer = train(grpo_trainer(algorithm, Recorded), tmp_path, steps=2, reward_funcs=funcs)
    logged = trainer.state.log_history[0]
    assert {"rewards/half/mean", "rewards/numeric/mean", "half/length"} <= logged.keys()
    assert seen.isfinite().all()


def test_a_configuration_that_does_not_go_with_the_algorithm(tmp_path):
    """TRL's ``beta`` would train at 0.001 and the algorithm at 0.04."""
    with pytest.raises(ValueError, match=r"GRPOConfig\(beta=0\.001\), and grpo has 0\.04: set beta=0\.04, or give"):
        train(grpo_trainer(algorithms.grpo()), tmp_path, beta=0.001)
    with pytest.raises(ValueError, match=r"RLOOConfig\(beta=0\.05\), and rloo has 0\.0: set beta=0\.0, or "):
        train(rloo_trainer(RLOO), tmp_path)
    assert issubclass(grpo_trainer(algorithms.gspo()), GRPOTrainer)
    assert losses.gspo is grpo_trainer(algorithms.gspo()).algorithm.policy_loss.fn


def test_the_settings_are_those_of_trl():
    """Every name is a field, with the default that a test without TRL takes for it."""
    theirs = {field.name: field.default for field in fields(GRPOConfig)}
    assert {name: theirs[name] for name in _settings.GRPO} == {
        field.name: field.default for field in fields(test_interop_trl.GRPOConfig) if field.name in _settings.GRPO
    }
    assert set(_settings.RLOO) <= {field.name for field in fields(RLOOConfig)}
