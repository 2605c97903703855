"""What only a cluster has: the same numbers as one process, and workers that die, hang or hold the wrong weights."""

import os
import signal
import threading
import time

import pytest
import torch
from execution_contract import SAMPLING, WIDTH, cluster, local, prompts, training_batch
from safetensors.torch import load_file

from rlprims import algorithms
from rlprims.execution import ExecutionError, OptimizerConfig
from tests import tiny

pytestmark = pytest.mark.ray
GRPO = algorithms.grpo()
PPO = algorithms.ppo()
SLOW = OptimizerConfig(lr=1e-3, eps=1e-4)  # Adam makes much of differences in rounding


def process_of(worker):
    """The process id of an actor."""
    import ray

    return ray.get(worker.__ray_call__.remote(lambda self: os.getpid()))


def sample(execution, seed=0):
    return execution.generate(prompts(), SAMPLING, seed=seed, prompt_width=WIDTH)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """Of a tied model the engine must be told that its head has changed too."""
    return tiny.save_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


class TestTheSameNumbers:
    """Two ranks and an engine, step by step beside one process: the same tokens, losses and norms to 1e-5."""

    @pytest.mark.parametrize("engine", ["hf", "vllm"])
    def test_as_one_process(self, tied, engine):
        one = local(tied, GRPO, optimizer=SLOW)
        many = cluster(tied, GRPO, training_workers=2, engine=engine, optimizer=SLOW)
        for step in range(4):
            mine, theirs = sample(one, seed=step), sample(many, seed=step)
            assert torch.equal(mine["responses"], theirs["responses"])
            assert torch.equal(mine["truncated"], theirs["truncated"])
            assert (theirs["weights_version"] == step + 1).all()
            torch.testing.assert_close(mine["rollout_log_probs"], theirs["rollout_log_probs"], rtol=0, atol=2e-5)
            batch = training_batch(one, seed=step)
            torch.testing.assert_close(one.log_probs(batch), many.log_probs(batch), rtol=0, atol=1e-5)
            a, b = one.update(batch, GRPO), many.update(batch, GRPO)
            assert b.loss == pytest.approx(a.loss, abs=1e-5)
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
            for name, metric in a.metrics.items():
                torch.testing.assert_close(metric.value(), b.metrics[name].value(), rtol=1e-5, atol=1e-5)
            one.sync_weights()
            many.sync_weights()

    def test_fewer_rows_than_ranks(self, tied):
        one, many = local(tied, GRPO), cluster(tied, GRPO, training_workers=2)
        batch = training_batch(one).select_idxs([3])
        batch["group_ids"] = torch.zeros(1, dtype=torch.int64)
        assert many.update(batch, GRPO).loss == pytest.approx(one.update(batch, GRPO).loss, abs=1e-6)

    def test_a_checkpoint_of_two_ranks_on_one(self, tied, tmp_path):
        two = cluster(tied, PPO, training_workers=2)
        batch = training_batch(two)
        for _ in range(2):
            two.update(batch, PPO)
            two.update_critic(batch, PPO)
        two.save(tmp_path)
        after = two.update(batch, PPO), two.update_critic(batch, PPO)
        two.close()
        one = cluster(tied, PPO, training_workers=1)
        one.load(tmp_path)
        again = one.update(batch, PPO), one.update_critic(batch, PPO)
        for mine, theirs in zip(after, again, strict=True):
            assert theirs.loss == pytest.approx(mine.loss, abs=1e-6)
            assert theirs.grad_norm == pytest.approx(mine.grad_norm, rel=1e-4)
        assert not list(tmp_path.rglob("*.pt")) + list(tmp_path.rglob("*.pkl")) + list(tmp_path.rglob(".metadata"))

    def test_the_shards_hold_the_model(self, tied, tmp_path):
        execution = cluster(tied, GRPO, training_workers=2)
        execution.update(training_batch(execution), GRPO)
        execution.save(tmp_path)
        whole = load_file(tmp_path / "policy" / "model.safetensors")
        assert len(list((tmp_path / "policy_shards").glob("*.safetensors"))) == 2
        assert all(tensor.isfinite().all() for tensor in whole.values())


class TestALostRolloutWorker:
    """It is replaced, and the batch is the one that would have been."""

    @pytest.mark.parametrize("engine", ["hf", "vllm"])
    def test_killed_while_it_generates(self, tied, engine):
        execution = cluster(tied, GRPO, rollout_workers=2, engine=engine)
        execution.update(training_batch(execution), GRPO)
        execution.sync_weights()
        undisturbed = sample(execution)
        victim = process_of(execution.rollouts.workers[0])
        threading.Timer(0.02, os.kill, (victim, signal.SIGKILL)).start()
        disturbed = [sample(execution) for _ in range(3)]
        assert execution.rollouts.replacements == 1
        for batch in disturbed:
            assert torch.equal(batch["responses"], undisturbed["responses"])
            assert torch.equal(batch["weights_version"], undisturbed["weights_version"])

    def test_one_that_hangs_is_given_up(self, tied):
        execution = cluster(tied, GRPO, rollout_workers=2, cluster={"call_timeout": 20.0})
        undisturbed = sample(execution)
        os.kill(process_of(execution.rollouts.workers[0]), signal.SIGSTOP)
        assert torch.equal(sample(execution)["responses"], undisturbed["responses"])
        assert execution.rollouts.replacements >= 1

    def test_too_many_end_the_run(self, tied):
        execution = cluster(tied, GRPO, cluster={"max_replacements": 0})
        os.kill(process_of(execution.rollouts.workers[0]), signal.SIGKILL)
        with pytest.raises(ExecutionError, match=r"rollout worker 0 of 1: .* 0 were replaced already"):
            sample(execution)

    def test_weights_that_did_not_arrive_are_noticed(self, tied):
        execution = cluster(tied, GRPO, cluster={"max_replacements": 1})
        stale = execution.rollouts.weights[0]
        execution.update(training_batch(execution), GRPO)
        execution.sync_weights()
        with pytest.raises(ExecutionError, match="does not have the weights it was sent: log-probs of the probe are"):
            execution.rollouts.sync(stale, 9, execution.rollouts.probe, execution.rollouts.check)


class TestALostRank:
    def test_the_rest_is_told_who(self, tied):
        execution = cluster(tied, GRPO, training_workers=2)
        batch = training_batch(execution)
        os.kill(process_of(execution.trainers.workers[0]), signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(ExecutionError, match=r"training rank [01] of 2"):
            execution.update(batch, GRPO)
        assert time.monotonic() - begun < 60

    def test_an_error_names_its_rank_and_carries_its_traceback(self, tied):
        execution = cluster(tied, GRPO, training_workers=2)
        with pytest.raises(ExecutionError, match=r"(?s)training rank [01] of 2 raised:.*no critic was loaded"):
            execution.values(training_batch(execution))


def test_a_cluster_without_room_says_so(tied):
    with pytest.raises(ExecutionError, match=r"no room for 2 workers of .* within 1 s; the cluster has"):
        cluster(tied, GRPO, cluster={"cpus_per_worker": 1000.0, "start_timeout": 1.0})
