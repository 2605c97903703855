"""The contract of a critic: it learns its returns, and apart from the policy."""

import pytest
import torch

from rlprims import algorithms, losses
from rlprims.algorithms import use
from rlprims.execution import OptimizerConfig
from tests.execution.execution_contract import identical, training_batch, weights, with_columns

PPO = algorithms.ppo().replace(value_loss=use(losses.value_loss))
SLOW = OptimizerConfig(lr=1e-3)


@pytest.fixture(scope="module")
def batch(execution):
    """The return is 1 after an even token and 0 after an odd one: the state says it."""
    batch = training_batch(execution)
    width = batch["prompts"].shape[1]
    state = torch.cat([batch["prompts"], batch["responses"]], 1)[:, width - 1 : -1]
    return with_columns(batch, returns=(state % 2 == 0).float() * batch["response_mask"])


def test_the_first_loss_is_that_of_zeros(fresh, batch):
    report = fresh(PPO).update_critic(batch, PPO)
    returns = batch["returns"][batch["response_mask"]]
    assert report.loss == pytest.approx(float((returns**2).mean() / 2), rel=1e-5)


def test_the_critic_learns_a_fixed_batch(fresh, batch):
    execution = fresh(PPO, critic_optimizer=SLOW)
    reports = [execution.update_critic(batch, PPO) for _ in range(30)]
    assert reports[-1].loss < 0.2 * reports[0].loss
    assert {report.lr for report in reports} == {SLOW.lr}
    mask = batch["response_mask"]
    error = (execution.values(batch) - batch["returns"])[mask].abs().mean()
    assert error < 0.3


def test_policy_and_critic_learn_apart(fresh, batch, tmp_path):
    execution = fresh(PPO)
    policy, critic = weights(execution, tmp_path / "0"), weights(execution, tmp_path / "0c", "critic")
    execution.update_critic(batch, PPO)
    assert identical(weights(execution, tmp_path / "1"), policy)
    taught = weights(execution, tmp_path / "1c", "critic")
    assert not identical(taught, critic)
    execution.update(batch, PPO)
    assert identical(weights(execution, tmp_path / "2c", "critic"), taught)
    assert not identical(weights(execution, tmp_path / "2"), policy)


def test_micro_batches_do_not_change_the_step(fresh, batch, tmp_path):
    saved, reports = [], []
    for options in ({}, {"max_tokens_per_micro_batch": 50}):
        execution = fresh(PPO, **options)
        reports += [execution.update_critic(batch, PPO) for _ in range(2)][1:]
        saved.append(weights(execution, tmp_path / str(len(saved)), "critic"))
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=1e-5)
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-5)
    for name, value in saved[0].items():
        torch.testing.assert_close(saved[1][name], value, rtol=1e-5, atol=1e-5)


def test_returns_that_are_not_finite_leave_it(fresh, batch, tmp_path):
    execution = fresh(PPO)
    before = weights(execution, tmp_path / "before", "critic")
    returns = batch["returns"].clone()
    returns[0, 0] = torch.nan
    assert execution.update_critic(with_columns(batch, returns=returns), PPO).skipped
    assert identical(weights(execution, tmp_path / "after", "critic"), before)
