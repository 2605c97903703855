"""The weights that engines are sent: how, what is noticed, and what is done when a transfer breaks."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
from torch import nn

from rlprims import algorithms
from rlprims.execution import ExecutionError, OptimizerConfig
from tests import tiny
from tests.execution.execution_contract import SAMPLING, WIDTH, cluster, local, prompts, training_batch

ray = pytest.importorskip("ray")

from rlprims.execution.ray._wire import (  # noqa: E402
    Endpoint,
    Info,
    Receiver,
    Sender,
    checksums,
    differences,
    layers,
)

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import this file
GRPO = algorithms.grpo()
SLOW = OptimizerConfig(lr=1e-3, eps=1e-4)
TENSORS = {
    "embed.weight": torch.randn(7, 3),
    "layers.0.a.weight": torch.randn(5, dtype=torch.bfloat16),
    "layers.0.b.weight": torch.randint(0, 9, (2, 2)),
    "norm.weight": torch.ones(1),
}


def infos(names):
    return [Info(x, str(TENSORS[x].dtype).removeprefix("torch."), list(TENSORS[x].shape)) for x in names]


PARTS = [infos(names) for names in layers(list(TENSORS))]


def started(count, heed=lambda: None, timeout=20.0):
    """A sender, and receivers that collect what comes in threads."""
    sender, got = Sender("127.0.0.1", timeout, heed), [None] * count

    def receive(i):
        try:
            got[i] = list(Receiver(Endpoint(*sender.address, 1 + i, 1 + count, timeout)).parts(PARTS))
        except Exception as error:
            got[i] = error

    threads = [threading.Thread(target=receive, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    return sender, got, threads


class TestTheWire:
    def test_every_receiver_has_every_tensor_a_layer_at_a_time(self):
        assert [[info.name for info in part] for part in PARTS] == [
            ["embed.weight"],
            ["layers.0.a.weight", "layers.0.b.weight"],
            ["norm.weight"],
        ]
        sender, got, threads = started(2)
        sender.connect(2)
        for part in PARTS:
            sender.send(part, [TENSORS[info.name] for info in part])
        sender.finish()
        for thread in threads:
            thread.join()
        sender.close()
        for received in got:
            assert [list(part) for part in received] == [[info.name for info in part] for part in PARTS]
            for part in received:
                assert all(torch.equal(x, TENSORS[name]) and x.dtype == TENSORS[name].dtype for name, x in part.items())

    def test_one_that_nobody_waits_for_ends_at_once_on_both_sides(self):
        end = time.monotonic() + 0.5

        def heed():
            if time.monotonic() > end:
                raise ConnectionAbortedError("engine 1 died")

        sender, got, threads = started(1, heed)
        with pytest.raises(ConnectionAbortedError, match="engine 1 died"):
            sender.connect(2)  # the second never comes
        sender.close()
        threads[0].join(10)
        assert isinstance(got[0], Exception)


class TestWhatIsNotWhatWasSent:
    SENT = checksums({"embed.weight": torch.randn(8, 2), "q.weight": torch.randn(4, 2), "k.weight": torch.randn(2, 2)})

    def held(self, **changes):
        (embed, q, k) = (self.SENT[name] for name in self.SENT)
        return {"embed.weight": embed, "qk.weight": (q[0] + k[0], q[1] + k[1]), "packed.weight": (0, 0)} | changes

    def test_nothing(self):
        assert differences(self.SENT, [self.held()], {"qk": ["q", "k"]}) == []

    def test_a_sum_that_is_another(self):
        wrong = self.held(**{"qk.weight": (12, 1), "embed.weight": (16, 2)})
        assert differences(self.SENT, [wrong], {"qk": ["q", "k"]}) == ["embed.weight", "qk.weight"]

    def test_shards_add_up(self):
        numbers, total = self.SENT["embed.weight"]
        halves = [{"embed.weight": (numbers // 2, total - 5)}, {"embed.weight": (numbers // 2, 5)}]
        assert differences(self.SENT, halves, {}) == []
        halves[0]["embed.weight"] = (numbers // 2, total)
        assert differences(self.SENT, halves, {}) == ["embed.weight"]

    def test_an_embedding_with_rows_added_to_it(self):
        numbers, total = self.SENT["embed.weight"]
        assert differences(self.SENT, [{"embed.weight": (numbers + 56, total)}], {}) == []

    def test_shards_as_large_as_the_whole(self):
        """A vocabulary of 32 is filled up to 64: each of two processes has 32 rows, the second nothing but zeros."""
        numbers, total = self.SENT["embed.weight"]
        held = [{"embed.weight": (numbers, total)}, {"embed.weight": (numbers, 0)}]
        assert differences(self.SENT, held, {}) == []

    def test_key_heads_that_several_processes_have(self):
        """Two processes share the queries, and each has the only key head."""
        (n, q), (m, k) = self.SENT["q.weight"], self.SENT["k.weight"]
        held = [{"qk.weight": (n // 2 + m, q - 7 + k)}, {"qk.weight": (n // 2 + m, 7 + k)}]
        assert differences(self.SENT, held, {"qk": ["q", "k"]}) == []
        held[1]["qk.weight"] = (n // 2 + m, 7 + k + 1)
        assert differences(self.SENT, held, {"qk": ["q", "k"]}) == ["qk.weight"]

    def test_a_halved_row_changes_the_sum(self):
        table = nn.Embedding(8, 4).weight.detach()
        halved = table.clone()
        halved[3] /= 2
        assert checksums({"w": table}) != checksums({"w": halved})


def in_worker(execution, function):
    return ray.get(execution.rollouts.workers[0].__ray_call__.remote(function))


def sample(execution, seed=0):
    return execution.generate(prompts(), SAMPLING, seed=seed, prompt_width=WIDTH)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.mark.release
def test_an_engine_of_two_processes_samples_what_one_process_does(tied):
    """Tensor parallelism 2 beside the local sampler, over updates; an embedding halved in the engine is found."""
    one = local(tied, GRPO, optimizer=SLOW)
    options = {"tensor_parallel_size": 2, "engine_options": {"max_num_batched_tokens": 512}, "max_replacements": 0}
    many = cluster(tied, GRPO, optimizer=SLOW, training_workers=2, engine="vllm", cluster=options)
    for step in range(2):
        mine, theirs = sample(one, seed=step), sample(many, seed=step)
        assert torch.equal(mine["responses"], theirs["responses"])
        torch.testing.assert_close(mine["rollout_log_probs"], theirs["rollout_log_probs"], rtol=0, atol=2e-5)
        batch = training_batch(one, seed=step)
        for execution in (one, many):
            execution.update(batch, GRPO)
            execution.sync_weights()
    in_worker(many, halve_a_row)
    with pytest.raises(ExecutionError, match=r"does not have the weights .* tensors differ, model.embed_tokens.weight"):
        many.rollouts._verify(0, *many.rollouts._ask(0))
    many.close()


def halve_a_row(worker):
    worker.engine.llm.collective_rpc(halve)


def halve(worker):
    worker.get_model().model.embed_tokens.weight.data[5] /= 2


def test_a_broken_transfer_of_weights_is_sent_again(tied):
    """A failure at either end: all is sent again; a stale engine is found at any rate; a lost one is replaced."""
    tiny_steps = OptimizerConfig(lr=1e-6)
    execution = cluster(tied, GRPO, optimizer=tiny_steps, rollout_workers=2, cluster={"max_replacements": 2})
    batch = training_batch(execution)
    execution.update(batch, GRPO)
    in_worker(execution, fail_once)
    execution.sync_weights()
    assert execution.rollouts.replacements == 0
    assert (sample(execution)["weights_version"] == 2).all()

    execution.update(batch, GRPO)
    ray.get(execution.trainers.workers[0].__ray_call__.remote(fail_to_send_once))
    execution.sync_weights()
    assert execution.rollouts.replacements == 0
    assert (sample(execution)["weights_version"] == 3).all()

    execution.update(batch, GRPO)
    in_worker(execution, ignore)
    execution.sync_weights()
    assert execution.rollouts.replacements == 1

    execution.update(batch, GRPO)
    in_worker(execution, die_in_mid_update)
    execution.sync_weights()
    assert execution.rollouts.replacements == 2
    rows = sample(execution)
    assert (rows["weights_version"] == 5).all()
    torch.testing.assert_close(rows["rollout_log_probs"], execution.log_probs(rows), rtol=0, atol=2e-5)


def fail_once(worker):
    update = worker.engine.update

    def failing(info):
        worker.engine.update = update
        next(worker.engine._wire.parts(info["parts"]))
        raise OSError("no such luck")

    worker.engine.update = failing


def fail_to_send_once(rank):
    """After the first layer."""
    from rlprims.execution.ray._wire import Sender

    send, calls = Sender.send, []

    def failing(self, part, tensors):
        calls.append(1)
        if len(calls) == 2:
            Sender.send = send
            raise OSError("no such luck")
        return send(self, part, tensors)

    Sender.send = failing


def ignore(worker):
    def ignoring(info):
        for part in worker.engine._wire.parts(info["parts"]):
            worker.engine._received |= checksums(part)

    worker.engine.update = ignoring


def die_in_mid_update(worker):
    def dying(info):
        next(worker.engine._wire.parts(info["parts"]))
        os.kill(os.getpid(), signal.SIGKILL)

    worker.engine.update = dying
