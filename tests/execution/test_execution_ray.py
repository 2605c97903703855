"""What only a cluster has: the same numbers as one process, and workers that die, hang or hold the wrong weights."""

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlprims import algorithms
from rlprims.execution import ExecutionError, OptimizerConfig
from tests import tiny
from tests.execution.execution_contract import SAMPLING, WIDTH, Restarted, cluster, local, prompts, save, training_batch

pytestmark = pytest.mark.ray
RELEASE = pytest.mark.release
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


@pytest.fixture(scope="module")
def two_ranks(tied, tmp_path_factory):
    """Two ranks, which never hold whole logits, and an engine, as they were at their start."""
    return Restarted(partial(cluster, tied, training_workers=2, optimizer=SLOW, fused_head=True), tmp_path_factory)


@pytest.fixture(scope="module")
def two_engines(tied, tmp_path_factory):
    """One rank and two engines, which tests kill and which are replaced."""
    build = partial(cluster, tied, rollout_workers=2, cluster={"max_replacements": 9})
    return Restarted(build, tmp_path_factory)


def assert_same_steps(one, many, count=4):
    """The same tokens, losses and norms to 1e-5, with a verified sync after every step."""
    for step in range(count):
        mine, theirs = sample(one, seed=step), sample(many, seed=step)
        assert torch.equal(mine["responses"], theirs["responses"])
        assert torch.equal(mine["ended"], theirs["ended"])
        assert (theirs["weights_version"] == step + 1).all()
        torch.testing.assert_close(mine["rollout_log_probs"], theirs["rollout_log_probs"], rtol=0, atol=2e-5)
        batch = training_batch(one, seed=step)
        torch.testing.assert_close(one.log_probs(batch), many.log_probs(batch), rtol=1e-5, atol=1e-5)
        a, b = one.update(batch, GRPO), many.update(batch, GRPO)
        assert b.loss == pytest.approx(a.loss, abs=1e-5)
        assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
        for name, metric in a.metrics.items():
            torch.testing.assert_close(metric.value(), b.metrics[name].value(), rtol=1e-5, atol=1e-5)
        one.sync_weights()
        many.sync_weights()


class TestTheSameNumbers:
    """Two ranks and an engine, step by step beside one process."""

    # Two ranks beside vLLM are those that divide the layers too.
    @pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=RELEASE)])
    def test_as_one_process(self, tied, two_ranks, engine):
        assert_same_steps(local(tied, GRPO, optimizer=SLOW), two_ranks(GRPO, engine=engine))

    def test_ranks_that_divide_the_layers(self, tmp_path):
        model = tiny.save_model(tmp_path, num_key_value_heads=2, tie_word_embeddings=True)
        one, many = (
            local(model, GRPO, optimizer=SLOW),
            cluster(
                model,
                GRPO,
                engine="vllm",
                optimizer=SLOW,
                training_workers=2,
                fused_head=True,
                cluster={"training_tensor_parallel": 2},
            ),
        )
        assert_same_steps(one, many, count=3)
        reports = {report.worker: report.work for report in many.reports() if "update" in report.work}
        flops = [work["update"].flops for work in reports.values()]
        assert len(flops) == 2
        assert sum(flops) == pytest.approx(one.reports()[0].work["update"].flops), "each rank did a half"
        batch = training_batch(one).select_idxs([3])
        batch["group_ids"] = torch.zeros(1, dtype=torch.int64)
        assert many.update(batch, GRPO).loss == pytest.approx(one.update(batch, GRPO).loss, abs=1e-6)
        many.close()

    def test_fewer_rows_than_ranks(self, tied, two_ranks):
        one, many = local(tied, GRPO, optimizer=SLOW), two_ranks(GRPO, engine="hf")
        batch = training_batch(one).select_idxs([3])
        batch["group_ids"] = torch.zeros(1, dtype=torch.int64)
        assert many.update(batch, GRPO).loss == pytest.approx(one.update(batch, GRPO).loss, abs=1e-6)

    @RELEASE  # in CI test_execution_ranks loads what other shards have saved
    def test_a_checkpoint_of_two_ranks_on_one(self, tied, tmp_path):
        two = cluster(tied, PPO, training_workers=2)
        batch = training_batch(two)
        for _ in range(2):
            two.update(batch, PPO)
            two.update_critic(batch, PPO)
        finish = two.save(tmp_path)
        after = two.update(batch, PPO), two.update_critic(batch, PPO)  # of what is saved they change nothing
        finish()
        two.close()
        one = cluster(tied, PPO, training_workers=1)
        one.load(tmp_path)
        again = one.update(batch, PPO), one.update_critic(batch, PPO)
        for mine, theirs in zip(after, again, strict=True):
            assert theirs.loss == pytest.approx(mine.loss, abs=1e-6)
            assert theirs.grad_norm == pytest.approx(mine.grad_norm, rel=1e-4)
        assert not list(tmp_path.rglob("*.pt")) + list(tmp_path.rglob("*.pkl")) + list(tmp_path.rglob(".metadata"))

    def test_the_shards_hold_the_model(self, two_ranks, tmp_path):
        execution = two_ranks(GRPO, engine="hf")
        execution.update(training_batch(execution), GRPO)
        save(execution, tmp_path)
        whole = load_file(tmp_path / "policy" / "model.safetensors")
        assert len(list((tmp_path / "policy_shards").glob("*.safetensors"))) == 2
        assert all(tensor.isfinite().all() for tensor in whole.values())


class TestPools:
    """Models in processes of their own compute what they do together in one."""

    def test_as_one_process(self, tied, tmp_path):
        reward = str(tiny.save_classifier(tmp_path / "reward"))
        algorithm = PPO.replace(loss_terms=GRPO.loss_terms)  # with a critic and a reference
        one = local(tied, algorithm, optimizer=SLOW, reward=reward)
        pools = {"values": {"workers": 2, "placement": "SPREAD"}, "frozen": {"cpus": 0.5}, "engines": {"workers": 2}}
        roles = {"critic": "values", "reference": "frozen", "reward": "frozen", "rollout": "engines"}
        apart = cluster(tied, algorithm, optimizer=SLOW, reward=reward, cluster={"pools": pools, "roles": roles})
        sizes = {name: len(group.workers) for name, group in apart.pools.items()}
        assert sizes == {"main": 1, "frozen": 1, "values": 2}
        assert len(apart.rollouts.workers) == 2
        for seed in range(2):
            batch = training_batch(one, seed=seed)
            assert torch.equal(batch["responses"], sample(apart, seed=seed)["responses"])
            for name in ("log_probs", "values", "reward_scores"):
                ours, theirs = getattr(one, name)(batch), getattr(apart, name)(batch)
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
            theirs = apart.log_probs(batch, reference=True)
            torch.testing.assert_close(one.log_probs(batch, reference=True), theirs, rtol=0, atol=1e-5)
            for update in ("update", "update_critic"):
                a, b = getattr(one, update)(batch, algorithm), getattr(apart, update)(batch, algorithm)
                assert b.loss == pytest.approx(a.loss, abs=1e-5)
                assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-4)
            one.sync_weights()
            apart.sync_weights()
        (tmp_path / "saved").mkdir()
        apart.save(tmp_path / "saved")()
        apart.close()
        together = cluster(tied, algorithm, optimizer=SLOW)
        together.load(tmp_path / "saved")
        torch.testing.assert_close(together.values(batch), one.values(batch), rtol=0, atol=1e-5)


@RELEASE  # in CI test_execution_ranks has ranks in bfloat16
def test_ranks_in_bfloat16_beside_an_engine_in_float32(tied, monkeypatch):
    """The engine is verified within what bfloat16 rounds, and weights that did not arrive are still noticed."""
    execution = cluster(tied, GRPO, fused_head=True, cluster={"mixed_precision": "bfloat16"})
    exact = local(tied, GRPO)
    execution.rollouts.delivery.take()
    batch = training_batch(exact)
    for _ in range(3):
        assert execution.update(batch, GRPO).loss == pytest.approx(exact.update(batch, GRPO).loss, rel=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(execution.rollouts.delivery, "take", lambda: None)  # what was taken before the updates is sent
        with pytest.raises(ExecutionError, match="log-probs of the probe are"):
            execution.sync_weights()
    execution.sync_weights()


@RELEASE  # in CI test_execution_ranks looks at what is sent in sixteen bits
@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_engines_of_a_model_in_bfloat16_get_bfloat16(tied, engine):
    """Ranks train float32 weights for them: sent as they are trained, no engine would have held what it was sent."""
    execution = cluster(tied, GRPO, engine=engine, dtype="bfloat16")
    one = local(tied, GRPO, dtype="bfloat16")
    batch = training_batch(one)
    assert execution.update(batch, GRPO).loss == pytest.approx(one.update(batch, GRPO).loss, rel=0.2)
    execution.sync_weights()
    assert execution.rollouts.delivery.dtype == "bfloat16"


class TestTurns:
    """An engine that sleeps while its rank trains gives the numbers of one that has a place of its own."""

    @pytest.mark.parametrize(("engine", "level"), [pytest.param("hf", 1, marks=RELEASE), ("vllm", 2)])
    def test_as_one_process(self, tied, engine, level, caplog):
        one = local(tied, GRPO, optimizer=SLOW)
        turns = cluster(tied, GRPO, optimizer=SLOW, engine=engine, cluster={"colocate": True, "sleep_level": level})
        seen = []
        for who, verbs in ((turns.rollouts, ("sleep", "wake", "send")), (turns.trainers, ("call",))):
            for verb in verbs:
                setattr(who, verb, noted(seen, verb, getattr(who, verb)))
        assert not turns.overlaps
        assert "engines free no memory when they sleep" in caplog.text  # on a CPU
        for seed in range(2):
            mine, theirs = sample(one, seed=seed), sample(turns, seed=seed)
            assert torch.equal(mine["responses"], theirs["responses"])
            batch = training_batch(one, seed=seed)
            assert turns.update(batch, GRPO).loss == pytest.approx(one.update(batch, GRPO).loss, abs=1e-5)
            before_sync = sample(turns, seed=seed)  # of the weights that were sent last
            assert torch.equal(before_sync["responses"], theirs["responses"])
            one.sync_weights()
            turns.sync_weights()
        again = ["send", "send_weights"] if level == 2 else []
        step = ["sleep", "onload", "update", "offload", "wake", *again]
        again = ["send_weights"]
        sync = ["sleep", "onload", "snapshot", "probe", "offload", "wake", "send", *again]
        assert seen == (step + sync) * 2


def noted(seen, verb, method):
    def call(*args, **kwargs):
        seen.append(args[0].__name__ if verb == "call" else verb)
        return method(*args, **kwargs)

    return call


def slow_down(worker):
    """A token takes a fifth of a second."""
    step = worker.engine.step

    def slowly():
        time.sleep(0.2)
        return step()

    worker.engine.step = slowly


def go_on(worker):
    """As before it was slowed down."""
    del worker.engine.step


class TestALostRolloutWorker:
    """It is replaced, and the batch is the one that would have been."""

    def test_a_slow_one_that_answers_is_not(self, two_engines, monkeypatch):
        """No response is complete within half of ``call_timeout``, and the engine answers between two tokens."""
        import ray

        execution = two_engines(GRPO, engine="vllm")
        undisturbed, replaced = sample(execution), execution.rollouts.replacements
        ray.get([worker.__ray_call__.remote(slow_down) for worker in execution.rollouts.workers])
        monkeypatch.setattr(execution.rollouts, "timeout", 6.0)
        begun = time.monotonic()
        slow = sample(execution)
        assert time.monotonic() - begun > execution.rollouts.timeout / 2
        assert torch.equal(slow["responses"], undisturbed["responses"])
        assert execution.rollouts.replacements == replaced
        ray.get([worker.__ray_call__.remote(go_on) for worker in execution.rollouts.workers])

    def test_killed_while_it_generates(self, two_engines):
        execution = two_engines.given_away(GRPO, engine="vllm")
        execution.update(training_batch(execution), GRPO)
        execution.sync_weights()
        undisturbed, replaced = sample(execution), execution.rollouts.replacements
        victim = process_of(execution.rollouts.workers[0])
        threading.Timer(0.02, os.kill, (victim, signal.SIGKILL)).start()
        disturbed = [sample(execution) for _ in range(3)]
        assert execution.rollouts.replacements == replaced + 1
        for batch in disturbed:
            assert torch.equal(batch["responses"], undisturbed["responses"])
            assert torch.equal(batch["weights_version"], undisturbed["weights_version"])

    def test_killed_while_the_policy_is_updated(self, two_engines, caplog):
        """Its prompts want the weights from before the update, and get them."""
        execution = two_engines(GRPO, engine="hf")
        batch, undisturbed, replaced = training_batch(execution), sample(execution), execution.rollouts.replacements
        with ThreadPoolExecutor(1) as threads:
            sampling = threads.submit(lambda: [sample(execution) for _ in range(3)])
            victim = process_of(execution.rollouts.workers[0])
            os.kill(victim, signal.SIGKILL)
            execution.update(batch, GRPO)
            disturbed = sampling.result()
        assert execution.rollouts.replacements == replaced + 1
        (told,) = [record.getMessage() for record in caplog.records if "is replaced" in record.getMessage()]
        line, _, details = told.partition("; it is replaced; details: ")
        assert re.fullmatch(r"rollout worker 0 of 2 died \(its process was killed or crashed: [^()]*\)", line)
        assert f"pid: {victim}" in Path(details).read_text()
        for rows in disturbed:
            assert torch.equal(rows["rollout_log_probs"], undisturbed["rollout_log_probs"])
            assert torch.equal(rows["weights_version"], undisturbed["weights_version"])

    def test_one_that_hangs_is_given_up(self, two_engines, monkeypatch):
        execution = two_engines.given_away(GRPO, engine="hf")
        undisturbed, replaced = sample(execution), execution.rollouts.replacements
        monkeypatch.setattr(execution.rollouts, "timeout", 20.0)
        os.kill(process_of(execution.rollouts.workers[0]), signal.SIGSTOP)
        assert torch.equal(sample(execution)["responses"], undisturbed["responses"])
        assert execution.rollouts.replacements > replaced

    @RELEASE
    def test_too_many_end_the_run(self, tied):
        execution = cluster(tied, GRPO, cluster={"max_replacements": 0})
        os.kill(process_of(execution.rollouts.workers[0]), signal.SIGKILL)
        with pytest.raises(
            ExecutionError,
            match=r"^rollout worker 0 of 1 died \(its process was killed [^.]*\); 0 were replaced already$",
        ):
            sample(execution)


class TestALostRank:
    def test_an_error_names_its_rank_and_carries_its_traceback(self, two_ranks):
        execution = two_ranks(GRPO, engine="hf")
        with pytest.raises(ExecutionError, match=r"training rank [01] of 2: .*no critic was loaded") as raised:
            execution.values(training_batch(execution))
        assert "\n" not in str(raised.value)
        assert "hf/_training.py" in raised.value.__notes__[0]

    def test_the_rest_is_told_who(self, two_ranks, monkeypatch):
        execution = two_ranks.given_away(GRPO, engine="hf")
        batch = training_batch(execution)
        victims = [process_of(worker) for worker in execution.trainers.workers]
        monkeypatch.setattr(execution.trainers, "heartbeat", 6.0)  # and a call may take two minutes
        execution.update(batch, GRPO)  # a rank that works answers
        os.kill(victims[1], signal.SIGSTOP)
        with pytest.raises(ExecutionError, match=r"^training rank 1 of 2 answered no ping within 3 s: its process is "):
            execution.update(batch, GRPO)
        os.kill(victims[0], signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(ExecutionError, match=r"training rank [01] of 2"):
            execution.update(batch, GRPO)
        assert time.monotonic() - begun < 60
