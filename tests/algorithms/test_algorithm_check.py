"""Each lint speaks in its case and is silent one step beside it."""

import pytest

from rlprims import advantage, algorithms, losses
from rlprims.algorithms import LossTerm, check, use

KL_IN_LOSS = LossTerm(coefficient=0.1, loss=use(losses.kl, value="k3", gradient="k2"))
OVERLONG = algorithms.dapo().score_shaping


def kl_term(**how):
    return algorithms.grpo().replace(loss_terms=[LossTerm(coefficient=0.1, loss=use(losses.kl, **how))])


CASES = {
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
        algorithms.grpo().replace(value_loss=losses.value),
        algorithms.grpo(),
    ),
    "KL paid twice": (
        "warning",
        "in the reward and in the loss",
        algorithms.grpo().replace(kl_in_reward={}, loss_terms=[KL_IN_LOSS]),
        algorithms.grpo().replace(loss_terms=[KL_IN_LOSS]),
    ),
    "k1 as a loss": ("warning", "regularizes nothing", kl_term(value="k1"), kl_term(value="k1", gradient="k2")),
    "k1's gradient under another value": (
        "warning",
        "regularizes nothing",
        kl_term(value="k3", gradient="k1"),
        kl_term(value="k3"),
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
    "no correction after the first update": (
        "warning",
        "corrects nothing after the first update",
        algorithms.rloo().replace(mini_batches=2),
        algorithms.rloo().replace(mini_batches=2, policy_loss=losses.clipped_surrogate),
    ),
    "nor in a second epoch": (
        "warning",
        "corrects nothing after the first update",
        algorithms.rloo().replace(epochs=2),
        algorithms.rloo(),
    ),
}


@pytest.mark.parametrize(("severity", "message", "wrong", "right"), CASES.values(), ids=CASES)
def test_a_lint_speaks_in_its_case_alone(severity, message, wrong, right):
    (finding,) = [finding for finding in check(wrong) if message in finding.message]
    assert finding.severity == severity
    assert not [finding for finding in check(right) if message in finding.message]


def test_errors_come_first():
    found = check(algorithms.grpo().replace(group_size=1, normalization=advantage.whiten, kl_in_reward={}))
    severities = [finding.severity for finding in found]
    assert severities == sorted(severities)
    assert {"error", "warning"} == set(severities)


def test_dapo_as_published_has_no_finding_at_all():
    assert check(algorithms.dapo()) == []


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (algorithms.gspo().replace(aggregation=losses.token_mean), "weighs a response by its length"),
        (algorithms.gspo().replace(policy_loss={"clip_high": 0.2}), "never does"),
        (algorithms.reinforce_pp().replace(normalization=advantage.whiten), "normalized over the batch again"),
    ],
)
def test_what_a_sequence_ratio_and_a_whitened_advantage_do_not_bear(spec: algorithms.Algorithm, expected: str) -> None:
    assert any(expected in finding.message for finding in check(spec))
