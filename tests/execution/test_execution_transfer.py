"""vLLM's own transfers of weights, NCCL and IPC, with its classes on a CPU; what they do on GPUs is in
test_execution_gpu."""

import importlib.util
import os
import signal
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from rlprims import algorithms
from rlprims.execution import OptimizerConfig, RayConfig
from tests import tiny
from tests.execution.execution_contract import SAMPLING, WIDTH, cluster, local, prompts, training_batch

ray = pytest.importorskip("ray")

from rlprims.execution._ray_config import backend_of  # noqa: E402
from rlprims.execution.ray import _execution, _start  # noqa: E402
from rlprims.execution.ray._fsdp import shard_of  # noqa: E402
from rlprims.execution.ray._transfer import (  # noqa: E402
    BrokenWith,
    EngineClient,
    Source,
)

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import this file
GRPO, REINFORCE = algorithms.grpo(), algorithms.reinforce()
SLOW = OptimizerConfig(lr=1e-3, eps=1e-4)
DEVICES = Path(__file__).with_name("cpu_devices.py")


class TestWhichBackend:
    @pytest.mark.parametrize(
        ("settings", "device", "backend"),
        [
            ({}, "cpu", "gloo"),
            ({"gpus_per_worker": 1}, "cuda", "nccl"),
            ({"gpus_per_worker": 0.5}, "cuda", "gloo"),  # NCCL refuses two processes on one device
            ({"gpus_per_worker": 1, "colocate": True}, "cuda", "ipc"),
            ({"gpus_per_worker": 1, "engine": "hf"}, "cuda", "gloo"),
            ({"gpus_per_worker": 1, "weight_transfer": "gloo"}, "cuda", "gloo"),
            (
                {
                    "gpus_per_worker": 1,
                    "pools": {"engines": {"gpus": 2}},
                    "roles": {"rollout": "engines"},
                    "tensor_parallel_size": 2,
                },
                "cuda",
                "nccl",
            ),
        ],
    )
    def test_follows_the_devices(self, settings, device, backend):
        assert backend_of(RayConfig(**settings), device) == backend

    @pytest.mark.parametrize("settings", [{"weight_transfer": "nccl"}, {"weight_transfer": "ipc", "colocate": True}])
    def test_one_that_needs_a_gpu(self, settings):
        with pytest.raises(ValueError, match=r"expected models on GPUs, got model.device cpu"):
            backend_of(RayConfig(gpus_per_worker=1, **settings), "cpu")


def on_a_gpu(name):
    """For a worker: its process has a GPU of this name, as far as vLLM's transfers know."""

    def change(worker):
        spec = importlib.util.spec_from_file_location("cpu_devices", DEVICES)
        module = sys.modules["cpu_devices"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.replace(name)

    return change


def run(worker, function):
    return ray.get(worker.__ray_call__.remote(function))


def started(monkeypatch, path, backend, **options):
    """An execution whose ranks and engines use a backend of vLLM's; rank i and engine i are on device i."""
    sync = _execution.RayExecution.sync_weights
    with monkeypatch.context() as patch:
        patch.setattr(_start, "backend_of", lambda cluster, device: backend)
        patch.setattr(_execution.RayExecution, "sync_weights", lambda self: None)
        execution = cluster(path, GRPO, optimizer=SLOW, engine="vllm", **options)
    for workers in (execution.trainers.workers, execution.rollouts.workers):
        for i, worker in enumerate(workers):
            run(worker, on_a_gpu(f"GPU-{i}"))
    start = execution.rollouts.start

    def replacement(rank):
        worker, building = start(rank)
        ray.get(building)
        run(worker, on_a_gpu(f"GPU-{rank}"))
        return worker, building

    execution.rollouts.start = replacement
    sync(execution)
    return execution


def updated(execution, seed=0):
    execution.update(training_batch(execution, seed=seed), GRPO)
    execution.sync_weights()
    rows = execution.generate(prompts(), SAMPLING, seed=seed, prompt_width=WIDTH)
    assert (rows["weights_version"] == execution.weights_version).all()
    torch.testing.assert_close(rows["rollout_log_probs"], execution.log_probs(rows), rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)


def receiver(worker):
    """The classes of what receives."""
    found = worker.engine.llm.collective_rpc(lambda self: type(self.weight_transfer_engine).__mro__)
    return [of.__name__ for of in found[0]]


@pytest.mark.release
@pytest.mark.parametrize(
    ("backend", "theirs", "model"),
    [("nccl", "NCCLWeightTransferEngine", "tied"), ("ipc", "IPCWeightTransferEngine", "untied")],
)
def test_engines_have_the_weights_of_two_ranks(request, monkeypatch, model, backend, theirs):
    """Several syncs, each verified by the sums of what came and of what engines hold, and by their log-probs."""
    path = request.getfixturevalue(model)
    execution = started(monkeypatch, path, backend, training_workers=2, rollout_workers=2)
    assert theirs in run(execution.rollouts.workers[0], receiver)
    for seed in range(2):
        updated(execution, seed)
    assert execution.rollouts.sent
    assert execution.rollouts.replacements == 0
    execution.close()


def test_an_engine_that_is_lost_in_a_transfer_by_nccl(monkeypatch, tied):
    """Nobody who waits for it would come back: all engines are replaced, which counts as one."""
    execution = started(monkeypatch, tied, "nccl", rollout_workers=2, cluster={"max_replacements": 1})
    before = list(execution.rollouts.workers)
    assert "NCCLWeightTransferEngine" in run(before[0], receiver)
    run(before[1], die_in_mid_update)
    updated(execution)
    assert execution.rollouts.replacements == 1
    assert not set(before) & set(execution.rollouts.workers)
    updated(execution, 1)  # over a new communicator of both
    execution.close()


def die_in_mid_update(worker):
    def dying(info):
        os.kill(os.getpid(), signal.SIGKILL)

    worker.engine.update = dying


def test_an_engine_that_refuses_a_part_by_ipc(monkeypatch, tied):
    """The ranks go on together to the end of the model, and all is sent again."""
    execution = started(monkeypatch, tied, "ipc", training_workers=2, rollout_workers=2)
    assert "IPCWeightTransferEngine" in run(execution.rollouts.workers[0], receiver)
    run(execution.rollouts.workers[1], refuse_once)
    updated(execution)
    assert execution.rollouts.replacements == 0
    execution.close()


def refuse_once(worker):
    update = worker.engine.update

    def refusing(info):
        worker.engine.update = update
        raise OSError("no such luck")

    worker.engine.update = refusing


class Words(nn.Module):
    """A model as vLLM's receivers see one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            getattr(parameters[name], "weight_loader", torch.Tensor.copy_)(parameters[name], tensor)


class Calls:
    """The client of receivers in this process."""

    def __init__(self, receivers):
        self.receivers, self.engines, self.size = receivers, dict(enumerate(receivers)), 1 + len(receivers)
        self.failures = {}

    def ask(self, call):
        with ThreadPoolExecutor() as threads:
            list(threads.map(call, range(len(self.receivers)), self.receivers))

    def init_weight_transfer_engine(self, info):
        offsets = [{"rank_offset": 1 + i} if "rank_offset" in info else {} for i in range(self.size - 1)]
        self.ask(lambda i, receiver: receiver.init_transfer_engine(receiver.parse_init_info(info | offsets[i])))

    def start_weight_update(self):
        self.ask(lambda i, receiver: receiver.start_weight_update())

    def update_weights(self, info):
        self.ask(lambda i, receiver: receiver.receive_weights(receiver.parse_update_info(info)))

    def finish_weight_update(self, weight_version=None):
        self.ask(lambda i, receiver: receiver.finish_weight_update())


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_vllms_classes_in_one_process(monkeypatch, backend):
    """Several buffers' worth of tensors, twice; and every tensor arrives in every receiver."""
    pytest.importorskip("vllm")
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    from rlprims.execution.ray import _vllm_transfer
    from rlprims.execution.ray._vllm_worker import RECEIVERS
    from tests.execution import cpu_devices

    cpu_devices.replace("GPU-0", monkeypatch.setattr)
    monkeypatch.setattr(_vllm_transfer, "_BUFFER", 1 << 10)
    cpu = torch.device("cpu")
    parallel = types.SimpleNamespace(rank=0, world_size=1, data_parallel_index=0)
    config = types.SimpleNamespace(parallel_config=parallel, model_config=types.SimpleNamespace(dtype=torch.float32))
    receivers = []
    for _ in range(2):
        model = Words().requires_grad_(False)
        record_metadata_for_reloading(model)
        receivers.append(RECEIVERS[backend](None, config, cpu, model))
    transfer = _vllm_transfer.Nccl(0, "127.0.0.1") if backend == "nccl" else _vllm_transfer.Ipc(0)
    for _ in range(2):
        policy = Words()
        shards = {name: shard_of(parameter) for name, parameter in policy.named_parameters()}
        sent = transfer.send(Source(policy, shards, "float32", cpu), Calls(receivers))
        assert set(sent) == set(shards)
        for receiver in receivers:
            assert receiver.received == sent
            for mine, theirs in zip(policy.parameters(), receiver.model.parameters(), strict=True):
                assert torch.equal(mine, theirs)


def test_an_engine_that_dies_while_a_communicator_is_made(monkeypatch, engines):
    """Rank 0 does not wait for it, which would take the five minutes of the store, and in NCCL for ever."""
    pytest.importorskip("vllm")
    from rlprims.execution.ray._vllm_transfer import Nccl
    from tests.execution import cpu_devices

    cpu_devices.replace("GPU-0", monkeypatch.setattr)
    policy = Words()
    shards = {name: shard_of(parameter) for name, parameter in policy.named_parameters()}
    client = EngineClient({0: ray.remote(Dies).remote(), 3: engines[3]}, processes=1, version=1, timeout=240.0)
    begun = time.monotonic()
    assert Nccl(0, "127.0.0.1").send(Source(policy, shards, "float32", torch.device("cpu")), client) == {}
    assert time.monotonic() - begun < 60
    assert "rollout worker 0 died" in str(client.failures[0])
    assert isinstance(client.failures[3], BrokenWith), "it would wait for the other"


class Dies:
    def open(self, info):
        os._exit(1)


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_experts_are_sent_as_a_checkpoint_has_them(kind, tmp_path):
    """For vLLM; for the engine ``hf`` as the model itself has them."""
    path = tiny.save_mixture(tmp_path, kind)
    stored = load_file(path / "model.safetensors")
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    shards = {name: shard_of(parameter) for name, parameter in policy.named_parameters()}
    for as_stored, expected in ((True, stored), (False, {name: shard.local for name, shard in shards.items()})):
        sent = {}
        for infos, tensors in Source(policy, shards, as_stored=as_stored):
            for info, tensor in zip(infos, tensors, strict=True):
                assert info.shape == list(tensor.shape)
                sent[info.name] = tensor
        assert sent.keys() == expected.keys()
        assert all(torch.equal(sent[name], expected[name]) for name in sent)


@pytest.mark.parametrize("kind", [pytest.param("mixtral", marks=pytest.mark.release), "qwen3_moe"])
def test_experts_reach_vllm(kind, tmp_path):
    """The first weights, and those after an update."""
    pytest.importorskip("vllm")
    path = tiny.save_mixture(tmp_path, kind)
    one, ranks = (build(path, REINFORCE) for build in (local, partial(cluster, engine="vllm")))
    try:
        for _ in range(2):
            mine, theirs = training_batch(one), training_batch(ranks)
            assert torch.equal(mine["responses"], theirs["responses"])
            torch.testing.assert_close(mine["rollout_log_probs"], theirs["rollout_log_probs"], rtol=0, atol=5e-5)
            for execution in (one, ranks):
                execution.update(mine, REINFORCE)
                execution.sync_weights()
    finally:
        ranks.close()


@pytest.fixture
def engines():
    from rlprims.execution.ray._cluster import connect

    connect(None, cpus=64)
    return {rank: ray.remote(Engine).remote(rank) for rank in (3, 5)}


class TestTheClient:
    """Its calls on Ray's actors."""

    def test_each_engine_has_its_own_ranks(self, engines):
        client = EngineClient(engines, processes=2, version=7, timeout=30.0)
        assert client.size == 5
        client.init_weight_transfer_engine({"rank_offset": 1, "host": "here"})
        assert [ray.get(engine.asked.remote())[-1] for engine in engines.values()] == [
            {"rank_offset": 1, "host": "here"},
            {"rank_offset": 3, "host": "here"},
        ]
        client.init_weight_transfer_engine({"packed": True})
        assert ray.get(engines[3].asked.remote())[-1] == {"packed": True}
        client.finish_weight_update()
        assert client.received == {3: 7, 5: 7}

    def test_after_a_failure_it_asks_for_nothing_more_and_the_others_abandon(self, engines):
        client = EngineClient(engines, processes=1, version=7, timeout=30.0)
        client.update_weights("fails on 5")
        client.update_weights("never asked")
        client.finish_weight_update()
        assert set(client.failures) == {3, 5}
        assert "the transfer broke" in str(client.failures[3])
        assert ray.get(engines[3].asked.remote())[-2:] == ["fails on 5", "abandon"]

    def test_without_timeouts_all_are_lost_at_once(self, engines):
        unblocked = []
        client = EngineClient(engines, processes=1, version=7, timeout=30.0, unblock=lambda: unblocked.append(1))
        client.update_weights("fails on 5")
        assert unblocked == [1]
        assert isinstance(client.failures[3], BrokenWith)
        assert not isinstance(client.failures[5], BrokenWith)


class Engine:
    def __init__(self, rank):
        self.rank, self.seen = rank, []

    def open(self, info):
        self.seen.append(info)

    def receive(self, info):
        self.seen.append(info)
        if info == f"fails on {self.rank}":
            raise OSError("no such luck")

    def finish_update(self, version):
        return version

    def abandon_update(self):
        self.seen.append("abandon")

    def asked(self):
        return self.seen


def test_the_port_of_a_transfer_is_vllms_alone():
    """Nobody else gets it between its choice and its use."""
    import socket

    utils = pytest.importorskip("vllm.distributed.utils")
    from rlprims.execution.ray._vllm_transfer import reserved_port

    with reserved_port("127.0.0.1") as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        group = utils.StatelessProcessGroup.create("127.0.0.1", port, rank=0, world_size=1)
        socket.create_connection(("127.0.0.1", port)).close()
        del group
