"""LoRA on a cluster: the numbers of one process, engines with the adapters or the merged weights, and a lost one."""

import os
import signal

import pytest
import torch

from rlprims import algorithms
from rlprims.execution import ExecutionError, OptimizerConfig
from tests.execution.execution_contract import cluster, local, on_v2, save, training_batch
from tests.execution.test_execution_ray import process_of, sample, tied

pytestmark = [pytest.mark.ray, pytest.mark.release]  # CI has adapters on Ray in tests/trainer/test_cluster_pairs.py
PPO = algorithms.ppo().replace(loss_terms=algorithms.grpo().loss_terms)  # a policy, its reference and a critic
SLOW = OptimizerConfig(lr=1e-3, eps=1e-4)
LORA = {"rank": 4, "sync": "adapter"}


__all__ = ["tied"]  # the fixture


@pytest.mark.parametrize(
    ("make", "engine", "ranks"),
    [(cluster, "hf", 2), (cluster, "vllm", 1), (on_v2, "vllm", 1)],
)
def test_the_numbers_are_those_of_one_process(tied, make, engine, ranks):
    """Adapters go to the engine and are sampled with: step by step the same tokens, losses, norms and reference."""
    one = local(tied, PPO, optimizer=SLOW, lora=LORA)
    many = make(tied, PPO, training_workers=ranks, engine=engine, optimizer=SLOW, lora=LORA)
    for step in range(3):
        mine, theirs = sample(one, seed=step), sample(many, seed=step)
        assert torch.equal(mine["responses"], theirs["responses"])
        assert (theirs["weights_version"] == step + 1).all()
        torch.testing.assert_close(mine["rollout_log_probs"], theirs["rollout_log_probs"], rtol=0, atol=2e-5)
        batch = training_batch(one, seed=step)
        for reference in (False, True):
            a, b = (execution.log_probs(batch, reference=reference) for execution in (one, many))
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        torch.testing.assert_close(one.values(batch), many.values(batch), rtol=0, atol=1e-5)
        for a, b in (
            (one.update_critic(batch, PPO), many.update_critic(batch, PPO)),
            (one.update(batch, PPO), many.update(batch, PPO)),
        ):
            assert b.loss == pytest.approx(a.loss, abs=1e-5)
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
        many.sync_weights()


def test_merged_weights_and_a_checkpoint_of_two_ranks_on_one(tied, tmp_path):
    two = cluster(tied, PPO, training_workers=2, engine="vllm", lora=LORA | {"sync": "merged"})
    batch = training_batch(two)
    for _ in range(2):
        two.update(batch, PPO)
        two.update_critic(batch, PPO)
    two.sync_weights()
    sampled = sample(two)
    torch.testing.assert_close(sampled["rollout_log_probs"], two.log_probs(sampled), rtol=0, atol=2e-5)
    save(two, tmp_path)
    plain = local(tmp_path / "policy", PPO)
    torch.testing.assert_close(plain.log_probs(batch), two.log_probs(batch), rtol=1e-5, atol=2e-5)
    after = two.update(batch, PPO), two.update_critic(batch, PPO)
    two.close()

    one = cluster(tied, PPO, lora=LORA)
    one.load(tmp_path)
    assert torch.equal(sample(one)["responses"], sampled["responses"])
    for mine, theirs in zip(after, (one.update(batch, PPO), one.update_critic(batch, PPO)), strict=True):
        assert theirs.loss == pytest.approx(mine.loss, abs=1e-6)
        assert theirs.grad_norm == pytest.approx(mine.grad_norm, rel=1e-4)


def test_a_worker_that_is_replaced_has_the_newest_adapters(tied):
    execution = cluster(tied, PPO, rollout_workers=2, lora=LORA, cluster={"max_replacements": 1})
    stale = execution.rollouts.delivery.reference
    first = sample(execution)
    for _ in range(2):
        execution.update(training_batch(execution), PPO)
        execution.sync_weights()
    undisturbed = sample(execution)
    assert not torch.equal(undisturbed["responses"], first["responses"])
    os.kill(process_of(execution.rollouts.workers[0]), signal.SIGKILL)
    again = sample(execution)
    assert execution.rollouts.replacements == 1
    assert torch.equal(again["responses"], undisturbed["responses"])
    assert torch.equal(again["weights_version"], undisturbed["weights_version"])
    # The probe is scored through the adapters: those of the beginning are noticed.
    execution.rollouts.delivery.reference = stale
    with pytest.raises(ExecutionError, match="does not have the weights it was sent: log-probs of the probe are"):
        execution.rollouts.send()
