"""An algorithm is a value: equal, hashable, and the same again after a file."""

import json
import math

import pytest
import torch

from rlprims import advantage, algorithms, corrections, filters, losses, rewards
from rlprims.algorithms import PRESETS, Algorithm, LossTerm, use


def shy(log_probs, advantages, response_mask, *, caution: float = 2.0):
    """A stranger's loss."""
    return torch.where(response_mask, -advantages * log_probs / caution, 0.0)


CHANGED = {
    "another function": lambda: algorithms.ppo().replace(advantage=advantage.rloo, value_loss=None, group_size=4),
    "a stranger's function": lambda: algorithms.grpo().replace(policy_loss=use(shy, caution=3)),
    "terms": lambda: algorithms.grpo().replace(
        loss_terms=[
            LossTerm(coefficient=0.1, loss=use(losses.kl, value="k3", gradient="k2")),
            LossTerm(coefficient=0.01, loss=use(losses.negative_entropy)),
        ]
    ),
    "two shapings": lambda: algorithms.dapo().replace(
        score_shaping=[use(rewards.overlong_penalty, max_length=n, buffer_length=1) for n in (8, 16)]
    ),
    "no limit": lambda: algorithms.dapo().replace(filter={"max_generation_batches": None, "at_limit": "smaller_batch"}),
    "KL in the reward": lambda: algorithms.rloo().replace(
        kl_in_reward={"estimator": "k2", "controller": {"fn": "rlprims.controllers.AdaptiveKL", "horizon": 50}}
    ),
    "no upper bound": lambda: algorithms.ppo().replace(policy_loss={"clip_high": math.inf}),
    "a small number": lambda: algorithms.grpo().replace(advantage={"eps": 1e-9}),
    "corrections": lambda: algorithms.dapo().replace(
        corrections=[use(corrections.tis, high=3.0), corrections.token_veto], token_selection=filters.high_entropy
    ),
    "a term on some tokens": lambda: algorithms.grpo().replace(
        loss_terms=[LossTerm(coefficient=0.1, loss=use(losses.nll), tokens=use(algorithms.is_correct, threshold=0.5))]
    ),
    "a critic's own target": lambda: algorithms.ppo().replace(value_target=use(advantage.td_lambda, lam=0.5)),
    "components": lambda: algorithms.gdpo(components=("a", "b", "c"), weights=(1, 2, 3)),
    "a dialect": lambda: algorithms.kl_cov(dialect="verl-0.9"),
    "other loops": lambda: algorithms.ppo().replace(name="naïve: yes", epochs=3, mini_batches=2),
}
ALL = {**PRESETS, **CHANGED}


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
class TestRoundTrip:
    def test_json(self, make):
        algorithm = make()
        assert Algorithm.from_json(algorithm.to_json()) == algorithm

    def test_yaml(self, make):
        algorithm = make()
        assert Algorithm.from_yaml(algorithm.to_yaml()) == algorithm

    def test_plain_values(self, make):
        algorithm = make()
        assert algorithms.parse(algorithm.model_dump(mode="json")) == algorithm
        assert algorithms.parse(algorithm.model_dump()) == algorithm

    def test_equal_values_are_one_key(self, make):
        assert make() == make()
        assert len({make(), make(), Algorithm.from_json(make().to_json())}) == 1


def test_all_these_algorithms_differ():
    made = [make() for make in ALL.values()]
    assert len(set(made)) == len(made)


def test_the_file_names_functions_by_their_public_paths():
    stored = json.loads(algorithms.dapo().to_json())
    assert stored["advantage"] == "rlprims.advantage.grpo"
    assert stored["policy_loss"] == {"fn": "rlprims.losses.clipped_surrogate", "clip_high": 0.28, "clip_low": 0.2}


def test_a_stranger_is_named_by_its_module():
    assert f"{__name__}.shy" in algorithms.grpo().replace(policy_loss=shy).to_yaml()


class TestLambda:
    algorithm = algorithms.reinforce().replace(
        policy_loss=lambda log_probs, advantages, response_mask, *, k=2.0: -k * advantages * log_probs
    )

    def test_it_works_in_memory(self):
        data = {name: torch.ones(1, 1) for name in ("log_probs", "advantages")}
        data["response_mask"] = torch.tensor([[True]])
        assert float(algorithms.policy_objective(self.algorithm, data)) == -2.0
        assert self.algorithm.needs >= {"log_probs", "advantages"}

    def test_the_algorithm_can_still_be_changed(self):
        changed = self.algorithm.replace(group_size=3, policy_loss={"k": 1.0})
        assert changed.policy_loss == use(self.algorithm.policy_loss.fn, k=1.0)

    @pytest.mark.parametrize("store", [Algorithm.to_json, Algorithm.to_yaml])
    def test_a_file_cannot_hold_it(self, store):
        with pytest.raises(ValueError, match=r"<lambda> cannot be imported, expected a function of a module"):
            store(self.algorithm)

    def test_nor_a_function_within_a_function(self):
        def inner(log_probs, response_mask):
            return log_probs

        with pytest.raises(ValueError, match="inner cannot be imported"):
            algorithms.reinforce().replace(policy_loss=inner).to_json()


def test_an_algorithm_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        algorithms.ppo().epochs = 2
