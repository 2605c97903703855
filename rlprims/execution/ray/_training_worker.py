"""The Ray actor that trains: one FSDP2 rank with its shards of the models."""

import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution._config import ModelConfig, OptimizerConfig, RayConfig
from rlprims.execution._meter import metered
from rlprims.execution._protocol import UpdateReport
from rlprims.execution.hf import RewardModel, StepTotals, Training, meter_of
from rlprims.execution.hf._adapters import merged, parameters, trained
from rlprims.execution.hf._models import device_of
from rlprims.execution.ray import _fsdp
from rlprims.execution.ray._observed import Observed
from rlprims.execution.ray._worker_group import everywhere, first, split


class TrainingWorker(Observed):
    """A rank of a pool: its shards of the models that are the pool's roles, all in one process."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.listener: socket.socket | None = None

    @first
    def address(self) -> tuple[str, int]:
        """Where the ranks can meet: a port of this node's address, and of no other."""
        import ray

        self.listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        host, port = self.listener.getsockname()[:2]
        return host, port

    @everywhere
    def build(
        self,
        address: tuple[str, int],
        cluster: RayConfig,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        options: dict[str, Any],
        roles: Collection[str],
    ) -> int | None:
        """Join the other ranks of the pool and load the models of its roles; the context window of the policy."""
        torch.set_num_threads(1)
        device = device_of(model).type
        self.lives_on_cpu = cluster.cpu_offload
        _fsdp.join(self.rank, self.size, address, self.listener, device=device, timeout=cluster.call_timeout)
        ranks = _fsdp.ranks(cluster, self.size, device)
        self.training = Training(model, optimizer, ranks=ranks, roles=roles, **options)
        # Whole on every rank: it has no gradients.
        self.reward_model = RewardModel(model) if model.reward and "reward" in roles else None
        self.meter = meter_of(self.training, cluster.mixed_precision)
        return self.training.context_window if "actor" in roles else None

    @split
    @metered
    def log_probs(self, batch: DataProto, *, reference: bool = False) -> Tensor:
        return self.training.log_probs(batch, reference=reference)

    @everywhere
    def probe(self, batch: DataProto) -> Tensor:
        """Log-probs of the same rows on every rank, at temperature 1, as an engine scores a prompt."""
        return self.training.log_probs(batch, temperature=1.0)

    @split
    @metered
    def entropies(self, batch: DataProto) -> Tensor:
        return self.training.entropies(batch)

    @split
    @metered
    def values(self, batch: DataProto) -> Tensor:
        return self.training.values(batch)

    @split
    @metered
    def reward_scores(self, batch: DataProto) -> Tensor:
        if self.reward_model is None:
            raise ValueError("no reward model was loaded: set model.reward")
        return self.reward_model.scores(batch)

    @split
    @metered
    def update(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        return self.training.update(batch, algorithm, totals)

    @split
    @metered
    def update_critic(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        return self.training.update_critic(batch, algorithm, totals)

    @everywhere
    @metered
    def weights(self) -> dict[str, tuple[str, np.ndarray]] | None:
        """What an engine is sent of the policy, by name, each with its dtype; rank 0 alone answers with it."""
        module, alone = self.training.policy.module, self.training.model.engine_lora is not None
        found = {}
        for name, parameter in (trained(module) if alone else parameters(module)).items():
            tensor = _fsdp.whole(parameter)
            if self.rank == 0:
                found[name] = tensor
        if self.rank != 0:
            return None
        sent = found if alone else merged(module, found)
        return {name: (str(x.dtype).removeprefix("torch."), _as_numpy(x)) for name, x in sent.items()}

    @everywhere
    def offload(self) -> None:
        """Give the device back: models and optimizers to the CPU, if they are not there."""
        self._move(torch.device("cpu"))
        if self.training.device.type == "cuda":
            torch.cuda.empty_cache()

    @everywhere
    def onload(self) -> None:
        self._move(self.training.device)

    def _move(self, device: torch.device) -> None:
        if self.training.device.type == "cpu" or self.lives_on_cpu:
            return
        states = self.training.train_states().values()
        frozen = (self.training.reference, self.reward_model.module if self.reward_model else None)
        for module in (*(state.module for state in states), *frozen):
            if module is not None:
                module.to(device)
        for state in states:
            for slots in state.optimizer.state.values():
                slots.update({name: slot.to(device) for name, slot in slots.items() if name != "step"})

    @everywhere
    def save(self, directory: Path) -> None:
        for name, state in self.training.train_states().items():
            _fsdp.save(state, directory, name, rank=self.rank)

    @everywhere
    def load(self, directory: Path) -> None:
        for name, state in self.training.train_states().items():
            _fsdp.load(state, directory, name)


def _as_numpy(tensor: Tensor) -> np.ndarray:
    """Arrays cross processes without a copy, tensors do not; numpy has no bfloat16, so its bits go."""
    array: np.ndarray = tensor.view(torch.int16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
    return array
