"""The contract of a critic: it learns its returns, and apart from the policy."""

import pytest
import torch
from safetensors import safe_open

from rlprims import algorithms, losses
from rlprims.algorithms import use
from rlprims.execution import OptimizerConfig
from tests.execution.execution_contract import identical, local, training_batch, weights, with_columns

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


def test_frozen_parts_keep_their_bits_and_have_no_optimizer_state(fresh, batch, tmp_path):
    """And a critic that is loaded goes on as it would have."""
    execution = fresh(PPO, critic_freeze=("self_attn",))
    start = weights(execution, tmp_path / "0", "critic")
    reports = [execution.update_critic(batch, PPO) for _ in range(2)]
    taught = weights(execution, tmp_path / "2", "critic")
    frozen = [name for name in start if "self_attn" in name]
    assert identical({name: start[name] for name in frozen}, {name: taught[name] for name in frozen})
    assert {"mlp", "score"} <= {part for n in start if not torch.equal(start[n], taught[n]) for part in n.split(".")}
    assert reports[1].loss < reports[0].loss

    shards = [safe_open(file, "pt") for file in (tmp_path / "2" / "critic_optimizer_shards").glob("*.safetensors")]
    names = [name for each in shards for name in each.keys()]  # noqa: SIM118
    assert not [name for name in names if "self_attn" in name]
    if hasattr(execution, "training"):
        trained = [x for x in execution.training.critic.module.parameters() if x.requires_grad]
        assert len(execution.training.critic.optimizer.state) == len(trained)
    else:
        assert [name for name in names if "mlp" in name]

    after = execution.update_critic(batch, PPO)
    execution.load(tmp_path / "2")
    again = execution.update_critic(batch, PPO)
    assert (again.loss, again.grad_norm, again.lr) == (after.loss, after.grad_norm, after.lr)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            ("self_attn", "attention.q"),
            "critic.freeze: 'attention.q' is in the name of no trained weight, of which one is model.embed_tok",
        ),
        (("model", "score"), "critic.freeze: 'score' is in the name of every trained weight"),
    ],
)
def test_parts_that_cannot_be_frozen(model_path, parts, message):
    with pytest.raises(ValueError, match=message):
        local(model_path, PPO, critic_freeze=parts)


def test_a_part_of_a_frozen_part_is_frozen_too(model_path):
    execution = local(model_path, PPO, critic_freeze=("self_attn", "q_proj"))
    frozen = {name for name, x in execution.training.critic.module.named_parameters() if not x.requires_grad}
    assert frozen == {name for name, _ in execution.training.critic.module.named_parameters() if "self_attn" in name}


def test_returns_that_are_not_finite_leave_it(fresh, batch, tmp_path):
    execution = fresh(PPO)
    before = weights(execution, tmp_path / "before", "critic")
    returns = batch["returns"].clone()
    returns[0, 0] = torch.nan
    assert execution.update_critic(with_columns(batch, returns=returns), PPO).skipped
    assert identical(weights(execution, tmp_path / "after", "critic"), before)
