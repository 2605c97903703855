"""The adapters for verl, called as verl calls them, with stand-ins for its registries; tests/peers has its own."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from rlprims import advantage, algorithms, losses
from rlprims.algorithms import use
from rlprims.interop.verl import install


class Manager:
    def __init__(self, config, tokenizer, compute_score, router=None):
        self.compute_score, self.router = compute_score, router


@pytest.fixture
def verl(monkeypatch):
    """Registries that behave as verl's do."""
    core, managers = types.SimpleNamespace(ADV_ESTIMATOR_REGISTRY={}, losses={}), types.SimpleNamespace()

    def register_adv_est(name):
        assert name not in core.ADV_ESTIMATOR_REGISTRY, "verl refuses a second one"
        return lambda fn: core.ADV_ESTIMATOR_REGISTRY.setdefault(name, fn)

    core.register_adv_est = register_adv_est
    core.register_policy_loss = lambda name: lambda fn: core.losses.update({name: fn})
    managers.registry = types.SimpleNamespace(REWARD_MANAGER={"naive": Manager})
    managers.register = lambda name: lambda cls: managers.registry.REWARD_MANAGER.update({name: cls})
    managers.get_reward_manager_cls = managers.registry.REWARD_MANAGER.__getitem__
    monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", core)
    monkeypatch.setitem(sys.modules, "verl.experimental.reward_loop.reward_manager", managers)
    return types.SimpleNamespace(
        estimators=core.ADV_ESTIMATOR_REGISTRY, losses=core.losses, managers=managers.registry.REWARD_MANAGER
    )


class Config(dict):
    @property
    def global_batch_info(self):
        return self["global_batch_info"]


NO_REWARDS = {"gdpo", "iw_opd", "teacher_gap"}
"""Estimators that read something else in the place of ``rewards``."""
REWARDS = torch.tensor([[0.0, 1.0], [0.5, 9.0], [0.0, 0.0], [0.0, 0.25]])
MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]])
UIDS = np.array(["b", "a", "b", "a"], dtype=object)


def test_every_estimator_is_registered_or_left_out_with_a_reason(verl):
    installed = install()
    assert installed.estimators == tuple(verl.estimators)
    assert installed.policy_losses == tuple(verl.losses)
    reads = {name: use(getattr(module, name)).needs for module in (advantage, losses) for name in module.__all__}
    estimators = {n for n in advantage.__all__ if {"rewards", "response_mask"} <= reads[n]} | NO_REWARDS
    policy_losses = {n for n in losses.__all__ if {"log_probs", "advantages"} <= reads[n]}
    registered = {name.removeprefix("rlprims/") for name in (*installed.estimators, *installed.policy_losses)}
    assert registered | installed.left_out.keys() == estimators | policy_losses
    assert not registered & installed.left_out.keys()
    assert installed.left_out["pkpo"] == "needs k; use install(algorithms.pkpo(k=4))"


def test_the_page_names_all_of_them(verl):
    installed = install()
    page = (Path(__file__).parents[2] / "docs" / "interop.md").read_text(encoding="utf-8")
    names = {name.removeprefix("rlprims/") for name in (*installed.estimators, *installed.policy_losses)}
    missing = {name for name in names | installed.left_out.keys() if f"`{name}`" not in page}
    assert not missing


def test_another_call_replaces(verl):
    install()
    first = verl.estimators["rlprims/grpo"]
    install()
    assert verl.estimators["rlprims/grpo"] is not first


def test_an_estimator_takes_verls_names_and_configuration(verl):
    install()
    call = {"token_level_rewards": REWARDS, "response_mask": MASK, "index": UIDS}
    advantages, returns = verl.estimators["rlprims/grpo"](
        **call, config=Config(norm_adv_by_std_in_grpo=False, gamma=0.5)
    )
    # Scores 1, 0.5, 0, 0.25: the second's 9 is outside the mask. Means 0.5 for b, 0.375 for a.
    expected = torch.tensor([[0.5, 0.5], [0.125, 0.0], [-0.5, -0.5], [-0.125, -0.125]])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, torch.tensor([[0.5, 1.0], [0.5, 0.0], [0.0, 0.0], [0.125, 0.25]]))

    advantages, _ = verl.estimators["rlprims/remax"](**call, reward_baselines=torch.full((4,), 0.5))
    torch.testing.assert_close(advantages[:, 0], torch.tensor([0.5, 0.0, -0.5, -0.25]))
    with pytest.raises(ValueError, match=r"expected \['baseline_scores'\]"):
        verl.estimators["rlprims/remax"](**call)


def test_an_algorithms_normalization_is_part_of_its_advantage(verl):
    install(algorithms.w_reinforce(positive=0.5).replace(advantage=advantage.discounted_returns))
    estimate = verl.estimators["rlprims/algorithms/w_reinforce"]
    advantages, _ = estimate(token_level_rewards=torch.tensor([[1.0], [-1.0]]), response_mask=torch.ones(2, 1))
    assert advantages.flatten().tolist() == [0.5, -1.0]


def loss_of(verl, name, *, mode="token-mean", weights=None, **step):
    config = Config(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=2.0, global_batch_info=step)
    log_probs = torch.log(torch.tensor([[1.5, 0.5], [4.0, 7.0]]))
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    return verl.losses[name](torch.zeros(2, 2), log_probs, advantages, mask, mode, config, weights)


def test_a_loss_takes_verls_names_and_configuration(verl):
    """Ratios 1.5, 0.5 with advantage 1 and 4 with advantage -1, under bounds of 0.9 and 1.3 and a dual clip of 2."""
    install()
    loss, metrics = loss_of(verl, "rlprims/clipped_surrogate")
    torch.testing.assert_close(loss, torch.tensor((-1.3 - 0.5 + 2.0) / 3))
    assert metrics["actor/clip_fraction_high"] == pytest.approx(1 / 3)
    assert metrics["actor/ratio_max"] == pytest.approx(4.0)
    by_mode = {
        "token-sum": 0.2,
        "seq-mean-token-sum": 0.1,
        "seq-mean-token-mean": (-0.9 + 2.0) / 2,
        "seq-mean-token-sum-norm": 0.05,
    }
    for mode, expected in by_mode.items():
        loss, _ = loss_of(verl, "rlprims/clipped_surrogate", mode=mode)
        torch.testing.assert_close(loss, torch.tensor(expected))


def test_counts_are_of_the_mini_batch_and_weights_multiply(verl):
    install()
    step = {"dp_size": 2, "batch_num_tokens": 6, "global_batch_size": 4, "loss_scale_factor": 10}
    loss, _ = loss_of(verl, "rlprims/clipped_surrogate", **step)
    torch.testing.assert_close(loss, torch.tensor(0.2 / 6 * 2))
    loss, _ = loss_of(verl, "rlprims/clipped_surrogate", mode="seq-mean-token-sum-norm", **step)
    torch.testing.assert_close(loss, torch.tensor(0.2 / 4 / 10 * 2))
    weights = torch.tensor([[2.0, 1.0], [0.5, float("nan")]])
    loss, _ = loss_of(verl, "rlprims/clipped_surrogate", weights=weights)
    torch.testing.assert_close(loss, torch.tensor((-2.6 - 0.5 + 1.0) / 3))
    with pytest.raises(ValueError, match="dp_size is 2, expected batch_num_tokens"):
        loss_of(verl, "rlprims/cispo", dp_size=2)


def test_the_old_policy_stands_for_the_samplers(verl):
    install()
    loss, _ = loss_of(verl, "rlprims/topr", mode="token-sum")
    # Good ones are imitated as they are, bad ones by their ratio of at most 1.
    expected = -(np.log(1.5) + np.log(0.5)) + np.log(4.0)
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float32))


def test_an_algorithm_keeps_its_own_hyperparameters(verl):
    install(algorithms.dr_grpo(max_length=10).replace(name="mine"))
    loss, _ = loss_of(verl, "rlprims/algorithms/mine", mode="token-mean")
    # Bounds of 0.8 and 1.2, no dual clip, two responses, a length of 10.
    torch.testing.assert_close(loss, torch.tensor((-1.2 - 0.5 + 4.0) / 20))


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (algorithms.ppo(), "gae reads values"),
        (algorithms.decoupled_ppo(), "decoupled_ppo reads rollout_log_probs"),
        (algorithms.grpo(), r"loss_terms: set actor\.use_kl_loss"),
        (algorithms.gspo().replace(corrections=("rlprims.corrections.tis",)), "corrections: set"),
        (algorithms.gspo().replace(aggregation=losses.prompt_token_mean), "prompt_token_mean reads group_ids"),
        (algorithms.gspo().replace(policy_coefficient=0.5), "policy_coefficient: "),
    ],
    ids=["critic", "three_policies", "kl", "corrections", "groups", "coefficient"],
)
def test_an_algorithm_that_reads_more_than_verl_hands_over(verl, algorithm, why):
    with pytest.raises(ValueError, match=f"does not pass the data that {algorithm.name} needs: .*{why}"):
        install(algorithm)
    assert not verl.estimators


def test_the_reward_manager_scores_by_the_verifiers(verl):
    install()
    manager = verl.managers["rlprims"]({}, None, compute_score=None, router="address")
    assert manager.router == "address"
    assert manager.compute_score("gsm8k", "#### 7", "7", {"num_turns": 1})["score"] == 1.0
    assert verl.managers["naive"] is Manager


def test_verl_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", None)
    with pytest.raises(ImportError, match=r"install needs verl .*: pip install verl"):
        install()
