"""The Ray actor that trains: one FSDP2 rank, with its shards of the models."""

import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import ray
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, OptimizerConfig, RayConfig, RunNeeds
from rlprims.execution._observed import Observed, metered
from rlprims.execution.hf import RewardModel, Training, meter_of
from rlprims.execution.hf._adapters import parameters, trained
from rlprims.execution.hf._models import device_of
from rlprims.execution.hf._training import of_training
from rlprims.execution.ray import _checkpoint, _fsdp
from rlprims.execution.ray._calls import dispatch
from rlprims.execution.ray._head import reports_work
from rlprims.execution.ray._transfer import EngineClient, Failures, Gloo, Source
from rlprims.execution.ray._wire import Sums
from rlprims.execution.ray._worker_group import SCORED, SCORED_BY_POLICY


class TrainingWorker(Observed):
    """A rank of a pool. One process holds its shards of the models of all the pool's roles."""

    concurrency_groups: ClassVar = {"pings": 1}

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.listener: socket.socket | None = None
        self.shards: dict[str, _fsdp.Shard] = {}
        self.transfers: dict[str, Any] = {}

    @dispatch("first")
    def address(self) -> tuple[str, int]:
        """Open a port for the other ranks, on this node's address only; returns host and port."""
        self.listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        host, port = self.listener.getsockname()[:2]
        return host, port

    @ray.method(concurrency_group="pings")  # type: ignore[untyped-decorator]
    def ping(self) -> None:
        """Return at once, in a thread beside the one that works. The answer shows that the process does not hang."""

    @dispatch("everywhere")
    @reports_work()
    def build(
        self,
        address: tuple[str, int],
        cluster: RayConfig,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        run: RunNeeds,
        roles: Collection[str],
    ) -> int | None:
        """Join the other ranks of the pool and load its models; returns the policy's context window, if it is there."""
        torch.set_num_threads(1)
        device = device_of(model).type
        self.lives_on_cpu, self.engine = cluster.cpu_offload, cluster.engine
        _fsdp.join(self.rank, self.size, address, self.listener, device=device, timeout=cluster.training_timeout)
        self.saver = _checkpoint.Saver(timeout=cluster.training_timeout)
        # Adapters compute in float32 in a model of any dtype, so FSDP gets no dtype to cast to.
        ranks = _fsdp.ranks(cluster, self.size, device, None if model.lora else model.dtype)
        self.training = Training(model.here(), optimizer, ranks=ranks, roles=roles, **run)
        # Every rank holds the whole reward model; it needs no memory for gradients.
        self.reward_model = RewardModel(model.here()) if model.reward and "reward" in roles else None
        self.meter = meter_of(self.training, cluster.mixed_precision, same_rows=cluster.training_tensor_parallel)
        return self.training.context_window if "actor" in roles else None

    log_probs = dispatch("split", columns=SCORED_BY_POLICY, share_prompts=True)(of_training(Training.log_probs))
    entropies = dispatch("split", columns=SCORED_BY_POLICY, share_prompts=True)(of_training(Training.entropies))
    top_tokens = dispatch("split")(of_training(Training.top_tokens))
    teacher_log_probs = dispatch("split")(of_training(Training.teacher_log_probs))
    teacher_top = dispatch("split")(of_training(Training.teacher_top))
    values = dispatch("split", columns=SCORED)(of_training(Training.values))
    update = dispatch("split", columns="tensors", share_prompts=True)(of_training(Training.update))
    update_critic = dispatch("split", columns="tensors")(of_training(Training.update_critic))

    @dispatch("split")
    @metered
    def reward_scores(self, batch: DataProto) -> Tensor:
        if self.reward_model is None:
            raise ValueError("no reward model was loaded: set model.reward")
        return self.reward_model.scores(batch)

    @dispatch("everywhere")
    def probe(self, batch: DataProto) -> Tensor:
        """Return the log-probs of the same rows on every rank, at temperature 1, as engines score a prompt."""
        return self.training.log_probs(batch, temperature=1.0)

    @dispatch("everywhere")
    def time_all_reduce(self, size: int) -> tuple[str, float, bool]:
        """See :func:`rlprims.execution.ray._fsdp.time_all_reduce`."""
        return _fsdp.time_all_reduce(size, self.training.device)

    @dispatch("everywhere")
    @metered
    def adapters(self) -> dict[str, Tensor] | None:
        """Gather the policy's adapters: on rank 0 by name; None on the other ranks."""
        found = {name: _fsdp.whole(parameter) for name, parameter in trained(self.training.policy.module).items()}
        return found if self.rank == 0 else None

    @dispatch("everywhere")
    @metered
    def snapshot(self) -> None:
        """Copy this rank's shards of the policy. Transfers send this copy until the next snapshot."""
        module: Any = self.training.policy.module
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass the parameters of the root module may still be gathered
        self.shards = {name: _fsdp.shard_of(x, copy=x.requires_grad) for name, x in parameters(module).items()}

    @dispatch("everywhere")
    @metered
    def send_weights(
        self, engines: dict[int, Any], *, backend: str, processes: int, dtype: str | None, version: int, timeout: float
    ) -> tuple[Sums, dict[int, Sums], Failures] | None:
        """Send the snapshot to these rollout workers, one layer at a time.

        Rank 0 returns the checksums of the sent tensors, those that each worker received, and the failures.
        """
        if backend not in self.transfers:
            self.transfers[backend] = _transfer_by(backend, self.rank, ray.util.get_node_ip_address(), timeout)
        client = EngineClient(engines, processes=processes, version=version, timeout=timeout)
        device = None if backend == "gloo" else self.training.device
        source = Source(self.training.policy.module, self.shards, dtype, device, as_stored=self.engine == "vllm")
        sent = self.transfers[backend].send(source, client)
        return (sent, client.received, client.failures) if self.rank == 0 else None

    @dispatch("everywhere")
    def offload(self) -> None:
        """Move models and optimizers to the CPU, to free the device's memory for an engine."""
        self._move(torch.device("cpu"))
        if self.training.device.type == "cuda":
            torch.cuda.empty_cache()

    @dispatch("everywhere")
    def onload(self) -> None:
        self._move(self.training.device)

    def _move(self, device: torch.device) -> None:
        if self.training.device.type == "cpu" or self.lives_on_cpu:
            return
        states = self.training.train_states().values()
        reward = self.reward_model.module if self.reward_model else None
        frozen = (self.training.reference, reward, *self.training.teachers.values())
        for module in (*(state.module for state in states), *frozen):
            if module is not None:
                module.to(device)
        for state in states:
            for slots in state.optimizer.state.values():
                slots.update({name: slot.to(device) for name, slot in slots.items() if name != "step"})

    @dispatch("everywhere")
    def save(self, directory: Path) -> None:
        """Copy this rank's shards, and start to write them in a thread."""
        self.saver.begin(self.training.train_states(), directory)

    @dispatch("everywhere")
    def saved(self) -> dict[str, str] | None:
        """The SHA-256 of this rank's files of the last save, by their paths; None while it is still writing them."""
        return None if self.saver.is_writing else self.saver.result()

    @dispatch("everywhere")
    def load(self, directory: Path) -> None:
        for name, state in self.training.train_states().items():
            _checkpoint.load(state, directory, name)


def _transfer_by(backend: str, rank: int, host: str, timeout: float) -> Any:
    """Return the backend of this name. Importing vLLM takes seconds and 165 MB, so only its backends do it."""
    if backend == "gloo":
        return Gloo(rank, host, timeout)
    from rlprims.execution.ray._vllm_transfer import Ipc, Nccl

    return Nccl(rank, host) if backend == "nccl" else Ipc(rank)
