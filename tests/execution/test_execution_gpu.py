"""What only GPUs show: weights by NCCL and IPC, CUDA graphs under updates, and the memory that sleep frees."""

import sys

import pytest
import torch

from rlprims import algorithms
from rlprims.execution import OptimizerConfig
from tests import tiny
from tests.execution.execution_contract import SAMPLING, WIDTH, cluster, prompts, training_batch

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.gpu]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import this file
GRPO = algorithms.grpo()
SLOW = OptimizerConfig(lr=1e-3, eps=1e-4)


def needs(devices):
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < devices, reason=f"needs {devices} GPUs, this machine has {found}")


def on_gpus(path, **cluster_options):
    """Float32 on both sides, so that log-probs agree; CUDA graphs are captured before the first sync."""
    options = {"gpus_per_worker": 1, "enforce_eager": False, **cluster_options}
    return cluster(path, GRPO, optimizer=SLOW, engine="vllm", device="cuda", cluster=options)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def updates(execution, count=3):
    """After each update the engine samples by the new weights: graphs read the storage that was written."""
    for seed in range(count):
        batch = training_batch(execution, seed=seed)
        before = execution.log_probs(batch)
        execution.update(batch, GRPO)
        execution.sync_weights()
        rows = execution.generate(prompts(), SAMPLING, seed=seed, prompt_width=WIDTH)
        mask = rows["response_mask"]
        apart = (rows["rollout_log_probs"] - execution.log_probs(rows))[mask].abs().max()
        moved = (execution.log_probs(batch) - before).abs().max()
        assert apart < 1e-3, apart
        assert moved > 10 * apart, "the update is too small to show that it arrived"
    assert execution.rollouts.replacements == 0


@needs(2)
def test_nccl_between_two_devices(tied):
    execution = on_gpus(tied)
    assert execution.rollouts.delivery.name == "nccl"
    updates(execution)
    execution.close()


@needs(3)
def test_weights_and_optimizer_of_two_ranks_on_the_cpu(tied):
    """Norms and weights are gathered from shards on the CPU, by gloo."""
    options = {"gpus_per_worker": 1, "cpu_offload": True}
    execution = cluster(tied, GRPO, optimizer=SLOW, engine="vllm", training_workers=2, device="cuda", cluster=options)
    updates(execution)
    execution.close()


@needs(3)
def test_an_engine_that_is_lost_in_a_transfer_by_nccl(tied):
    """The sender waits in a kernel, which is aborted; both engines are replaced."""
    execution = cluster(
        tied,
        GRPO,
        optimizer=SLOW,
        engine="vllm",
        rollout_workers=2,
        device="cuda",
        cluster={"gpus_per_worker": 1, "max_replacements": 1},
    )
    ray.get(execution.rollouts.workers[1].__ray_call__.remote(die_in_mid_update))
    updates_of_one = training_batch(execution, seed=0)
    execution.update(updates_of_one, GRPO)
    execution.sync_weights()
    assert execution.rollouts.replacements == 1
    updates_after = execution.generate(prompts(), SAMPLING, seed=0, prompt_width=WIDTH)
    assert (updates_after["weights_version"] == 2).all()
    execution.close()


def die_in_mid_update(worker):
    import os
    import signal

    def dying(info):
        os.kill(os.getpid(), signal.SIGKILL)

    worker.engine.update = dying


@needs(1)
@pytest.mark.parametrize("level", [1, 2])
def test_ipc_on_one_device_and_what_sleep_frees(tied, level):
    cache = 1 << 30
    execution = on_gpus(tied, colocate=True, sleep_level=level, kv_cache_bytes=cache)
    assert execution.rollouts.delivery.name == "ipc"
    execution.sharing.give_to_engines()
    awake = free(execution)
    execution.sharing.give_to_ranks()
    assert free(execution) - awake > 0.9 * cache
    updates(execution)
    execution.close()


def free(execution):
    """Bytes of the device that no process holds."""
    look = execution.trainers.workers[0].__ray_call__.remote(lambda worker: torch.cuda.mem_get_info()[0])
    return ray.get(look)


@needs(1)
def test_the_sums_of_a_tensor_are_the_same_on_both_devices():
    from rlprims.execution.hf._adapters import sum_of_bits

    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        tensor = torch.randn(1000, 7).mul(50).to(dtype)
        assert sum_of_bits(tensor) == sum_of_bits(tensor.cuda())
