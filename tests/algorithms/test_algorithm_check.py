"""Each lint speaks in its case and is silent one step beside it."""

import inspect

import pytest
import torch

from rlprims import advantage, algorithms, controllers, corrections, filters, losses
from rlprims.algorithms import LossTerm, check, use

KL_IN_LOSS = LossTerm(coefficient=0.1, loss=use(losses.kl, value="k3", gradient="k2"))
OVERLONG = algorithms.dapo().score_shaping


def strangers_loss(log_probs, advantages, response_mask, *, clip_high: float = -1.0):
    """Of another library: its hyperparameters are its own affair."""
    return -torch.where(response_mask, log_probs * advantages, 0.0)


def kl_term(**how):
    return algorithms.grpo().replace(loss_terms=[LossTerm(coefficient=0.1, loss=use(losses.kl, **how))])


def less_a_divergence(rewards, topk_log_probs, teacher_topk_log_probs, response_mask):
    """Of another library: a KL over several tokens off each token's advantage, miles#2362."""
    return rewards - losses.topk_kl(topk_log_probs, teacher_topk_log_probs, response_mask)


def divergences_to_come(rewards, topk_log_probs, teacher_topk_log_probs, response_mask):
    now = less_a_divergence(rewards, topk_log_probs, teacher_topk_log_probs, response_mask)
    return now.flip(-1).cumsum(-1).flip(-1)


divergences_to_come.of_later_tokens = True

CASES = {
    "a divergence over several tokens in an advantage": (
        "error",
        "does not depend on the sampled token, so that its expected gradient as an advantage is 0",
        algorithms.opd().replace(advantage=less_a_divergence),
        algorithms.opd().replace(advantage=divergences_to_come),
    ),
    "a bound that the loss itself refuses": (
        "error",
        "policy_loss: losses.clipped_surrogate refuses clip_high=-1.0, expected a number of at least 0",
        algorithms.grpo().replace(policy_loss={"clip_high": -1}),
        algorithms.grpo().replace(policy_loss={"clip_high": 0.0}),
    ),
    "a buffer that is longer than the response": (
        "error",
        "score_shaping.0: rewards.overlong_penalty refuses buffer_length=4096",
        algorithms.dapo(max_length=8),
        algorithms.dapo(max_length=8, buffer_length=4),
    ),
    "a controller that cannot be made": (
        "error",
        "kl_in_reward: controllers.AdaptiveKL refuses",
        algorithms.rloo().replace(kl_in_reward={"controller": use(controllers.AdaptiveKL, horizon=0)}),
        algorithms.rloo().replace(kl_in_reward={"controller": controllers.AdaptiveKL}),
    ),
    "a loss in the advantage stage": (
        "error",
        "advantage is losses.clipped_surrogate, expected a function of rlprims.advantage",
        algorithms.rloo().replace(advantage=losses.clipped_surrogate),
        algorithms.rloo(),
    ),
    "an estimator in the place of a loss": (
        "error",
        "policy_loss is advantage.grpo, expected a function of rlprims.losses",
        algorithms.rloo().replace(policy_loss=advantage.grpo),
        algorithms.rloo(),
    ),
    "a mean in the place of a loss": (
        "error",
        "policy_loss is losses.token_mean, expected a loss per token",
        algorithms.rloo().replace(policy_loss=losses.token_mean),
        algorithms.rloo(),
    ),
    "a loss in the place of the mean": (
        "error",
        "aggregation is losses.reinforce, expected a mean of losses",
        algorithms.rloo().replace(aggregation=losses.reinforce),
        algorithms.rloo(),
    ),
    "a mean in a loss term": (
        "error",
        "loss_terms.0 is losses.token_mean, expected a loss per token",
        algorithms.rloo().replace(loss_terms=[LossTerm(coefficient=1.0, loss=use(losses.token_mean))]),
        algorithms.rloo().replace(loss_terms=[LossTerm(coefficient=1.0, loss=use(losses.negative_entropy))]),
    ),
    "a stranger's loss in the advantage stage": (
        "error",
        "which reads advantages, and there are none before that stage ends",
        algorithms.rloo().replace(advantage=strangers_loss),
        algorithms.rloo().replace(policy_loss=strangers_loss),
    ),
    "a group of one has nobody to compare with": (
        "error",
        "compares the samples of a prompt, and group_size is 1",
        algorithms.rloo().replace(group_size=1),
        algorithms.rloo().replace(group_size=2),
    ),
    "a filter on groups of one": (
        "error",
        "every group would be dropped",
        algorithms.reinforce().replace(filter={}),
        algorithms.reinforce().replace(filter={}, group_size=2),
    ),
    "values that nothing trains": (
        "error",
        "no value_loss trains the critic",
        algorithms.ppo().replace(value_loss=None),
        algorithms.ppo(),
    ),
    "a critic that nothing reads": (
        "error",
        "does not read: remove it",
        algorithms.grpo().replace(value_loss=losses.value_loss),
        algorithms.grpo(),
    ),
    "KL paid twice": (
        "warning",
        "in the reward and in the loss",
        algorithms.grpo().replace(kl_in_reward={}, loss_terms=[KL_IN_LOSS]),
        algorithms.grpo().replace(loss_terms=[KL_IN_LOSS]),
    ),
    "another KL paid twice": (
        "warning",
        "in the reward and in the loss",
        algorithms.grpo(dialect="trl-1.16").replace(kl_in_reward={}),
        algorithms.grpo(dialect="trl-1.16"),
    ),
    "k1 as a loss": ("warning", "has no effect", kl_term(value="k1"), kl_term(value="k1", gradient="k2")),
    "k1's gradient under another value": (
        "warning",
        "has no effect",
        kl_term(value="k3", gradient="k1"),
        kl_term(value="k3"),
    ),
    "weights that are 1 in the only update": (
        "warning",
        "every weight is 1",
        algorithms.fipo().replace(mini_batches=1),
        algorithms.fipo(),
    ),
    "normalized twice": (
        "warning",
        "normalized over the batch again",
        algorithms.grpo().replace(normalization=advantage.whiten),
        algorithms.dr_grpo().replace(normalization=advantage.whiten),
    ),
    "length is all that differs": (
        "warning",
        "learns to be short",
        algorithms.dapo().replace(filter=None),
        algorithms.dapo().replace(filter=None, advantage={"normalize_std": False}),
    ),
    "a filter on the penalized score": (
        "warning",
        "filter on acc or scores",
        algorithms.dapo(metric="shaped_scores"),
        algorithms.dapo(metric="scores"),
    ),
    "clipped advantages are not normalized": (
        "warning",
        "normalized over the batch again",
        algorithms.grpo().replace(normalization=advantage.whiten),
        algorithms.grpo().replace(normalization=use(advantage.clip_advantages, low=-2.0, high=2.0)),
    ),
    "two corrections of one gap": (
        "error",
        "corrections.tis and corrections.icepop account for the same gap",
        algorithms.dapo().replace(corrections=[corrections.tis, corrections.icepop]),
        algorithms.dapo().replace(corrections=[corrections.tis, corrections.token_veto, corrections.geometric_gate]),
    ),
    "a gap that the loss corrects for itself": (
        "error",
        "losses.dppo has its ratio to the policy that sampled, and corrections.tis corrects for the same gap again",
        algorithms.dppo().replace(corrections=[corrections.tis]),
        algorithms.dppo().replace(corrections=[corrections.token_veto]),
    ),
    "the same of three policies": (
        "error",
        "losses.decoupled_ppo has its ratio to the policy that sampled",
        algorithms.decoupled_ppo().replace(corrections=[corrections.mis]),
        algorithms.decoupled_ppo(dialect="areal-2026.05"),
    ),
    "rows are chosen where groups are dropped": (
        "error",
        "filters.max_variance chooses rows within them",
        algorithms.dapo().replace(filter={"keep": use(filters.max_variance, keep=4)}),
        algorithms.dapo().replace(filter={"keep": filters.solve_rate}),
    ),
    "all of a group are kept": (
        "warning",
        "keep=8 keeps every response of a group of 8: sample more",
        algorithms.grpo().replace(group_size=8, advantage={"keep": 8}),
        algorithms.grpo().replace(group_size=9, advantage={"keep": 8}),
    ),
    "no columns for the components": (
        "error",
        "name the verifier's columns there",
        algorithms.gdpo(components=()),
        algorithms.gdpo(),
    ),
    "KL-Cov as a selection": (
        "error",
        "filters.kl_cov selects the tokens to penalize",
        algorithms.grpo().replace(token_selection=filters.kl_cov),
        algorithms.kl_cov(),
    ),
    "Clip-Cov as the tokens of a term": (
        "warning",
        "it is a token_selection",
        algorithms.grpo().replace(
            loss_terms=[LossTerm(coefficient=1, loss=use(losses.kl), tokens=use(filters.clip_cov))]
        ),
        algorithms.clip_cov(),
    ),
    "held to the policy itself": (
        "warning",
        "the term has no effect",
        algorithms.kl_cov().replace(mini_batches=1),
        algorithms.kl_cov().replace(mini_batches=1, epochs=2),
    ),
    "GDPO behind a filter of one column": (
        "warning",
        "the filter uses acc only",
        algorithms.gdpo().replace(filter={}),
        algorithms.gdpo().replace(filter={"keep": filters.varied_components}),
    ),
    "a success rate that is penalized": (
        "warning",
        "advantage.maxrl uses the group's mean reward as the share of correct responses, and score_shaping",
        algorithms.maxrl().replace(score_shaping=OVERLONG),
        algorithms.grpo().replace(score_shaping=OVERLONG),
    ),
    "a success rate less a KL": (
        "warning",
        "advantage.beta_normalized uses the group's mean reward as the share of correct responses, and kl_in_reward",
        algorithms.bnpo().replace(kl_in_reward={}),
        algorithms.bnpo(),
    ),
    "no correction after the first update": (
        "warning",
        "has no ratio for later updates",
        algorithms.rloo().replace(mini_batches=2),
        algorithms.rloo().replace(mini_batches=2, policy_loss=losses.clipped_surrogate),
    ),
    "nor in a second epoch": (
        "warning",
        "has no ratio for later updates",
        algorithms.rloo().replace(epochs=2),
        algorithms.rloo(),
    ),
}


@pytest.mark.parametrize(("severity", "message", "wrong", "right"), CASES.values(), ids=CASES)
def test_a_lint_reports_only_its_own_case(severity, message, wrong, right):
    (finding,) = [finding for finding in check(wrong) if message in finding.message]
    assert finding.severity == severity
    assert not [finding for finding in check(right) if message in finding.message]


def test_errors_come_first():
    found = check(algorithms.grpo().replace(group_size=1, normalization=advantage.whiten, kl_in_reward={}))
    severities = [finding.severity for finding in found]
    assert severities == sorted(severities)
    assert {"error", "warning"} == set(severities)


@pytest.mark.parametrize("preset", algorithms.PRESETS.values())
def test_no_preset_is_misplaced_or_impossible(preset):
    found = [finding.message for finding in check(preset())]
    assert not [message for message in found if "expected a function of" in message or " refuses " in message]


@pytest.mark.parametrize("spec", [algorithms.dapo(), algorithms.rloo(dialect="trl-1.16")], ids=["dapo", "trl's rloo"])
def test_as_published_there_is_no_finding_at_all(spec):
    assert check(spec) == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (algorithms.gspo().replace(aggregation=losses.token_mean), "weights a response by its length"),
        (algorithms.gspo().replace(policy_loss={"clip_high": 0.2}), "almost never clips"),
        (algorithms.gspo(dialect="verl-0.9").replace(policy_loss={"clip_low": 0.2}), "gspo_token clips a mean"),
        (algorithms.bnpo().replace(normalization=advantage.whiten), "normalized over the batch again"),
        (
            algorithms.pass_at_k_training(dialect="verl-0.9").replace(normalization=advantage.whiten),
            "normalized over the batch again",
        ),
        (algorithms.reinforce_pp().replace(normalization=advantage.whiten), "normalized over the batch again"),
    ],
)
def test_check_finds_what_sequence_ratios_and_whitened_advantages_do_not_bear(
    spec: algorithms.Algorithm, expected: str
) -> None:
    assert any(expected in finding.message for finding in check(spec))


@pytest.mark.parametrize("name", corrections.__all__)
def test_the_corrections_that_count_as_such_are_those_that_account_for_a_gap(name: str) -> None:
    """What the lint lists is what ``Weights`` says."""
    correction, mask = getattr(corrections, name), torch.ones(1, 1, dtype=torch.bool)
    data = dict.fromkeys(("log_probs", "old_log_probs", "rollout_log_probs", "advantages"), torch.zeros(1, 1))
    if name in ("Weights", "batch_normalized", "replace_nonfinite"):
        return  # these take weights, or give log-probs
    part = use(correction, delta=0.1) if "delta" in inspect.signature(correction).parameters else use(correction)
    accounts = bool(part({**data, "response_mask": mask}).corrected)
    found = [finding.message for finding in check(algorithms.dapo().replace(corrections=[part, part]))]
    assert any("account for the same gap" in message for message in found) == accounts
