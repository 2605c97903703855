"""See :class:`TrainingWorker`."""

import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution._config import ModelConfig, OptimizerConfig, RayConfig
from rlprims.execution._protocol import UpdateReport
from rlprims.execution.hf import RewardModel, Training
from rlprims.execution.hf._models import device_of
from rlprims.execution.ray import _fsdp
from rlprims.execution.ray._worker_group import everywhere, first, split
from rlprims.types import Totals


class TrainingWorker:
    """A rank: its shards of the policy, the reference and the critic, all in one process."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    @first
    def address(self) -> str:
        """Where the ranks can meet."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    @everywhere
    def build(
        self,
        address: str,
        cluster: RayConfig,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        options: dict[str, Any],
    ) -> int:
        """Join the other ranks and load the models; the context window."""
        torch.set_num_threads(1)
        device = device_of(model).type
        _fsdp.join(self.rank, self.size, address, device=device, timeout=cluster.call_timeout)
        self.training = Training(model, optimizer, ranks=_fsdp.ranks(cluster, self.size, device), **options)
        self.reward_model = RewardModel(model) if model.reward else None  # whole on every rank: it has no gradients
        return self.training.context_window

    @split
    def log_probs(self, batch: DataProto, *, reference: bool = False) -> Tensor:
        return self.training.log_probs(batch, reference=reference)

    @everywhere
    def probe(self, batch: DataProto) -> Tensor:
        """Log-probs of the same rows on every rank, at temperature 1, as an engine scores a prompt."""
        return self.training.log_probs(batch, temperature=1.0)

    @split
    def entropies(self, batch: DataProto) -> Tensor:
        return self.training.entropies(batch)

    @split
    def values(self, batch: DataProto) -> Tensor:
        return self.training.values(batch)

    @split
    def reward_scores(self, batch: DataProto) -> Tensor:
        if self.reward_model is None:
            raise ValueError("no reward model was loaded: set model.reward")
        return self.reward_model.scores(batch)

    @split
    def update(self, batch: DataProto, algorithm: Algorithm, totals: Totals) -> UpdateReport:
        return self.training.update(batch, algorithm, totals)

    @split
    def update_critic(self, batch: DataProto, algorithm: Algorithm, totals: Totals) -> UpdateReport:
        return self.training.update_critic(batch, algorithm, totals)

    @everywhere
    def weights(self) -> dict[str, tuple[str, np.ndarray]] | None:
        """The policy's weights by name, each with its dtype; rank 0 alone answers with them."""
        found = {}
        for name, parameter in self.training.policy.module.named_parameters():
            tensor = _fsdp.whole(parameter)
            if self.rank == 0:
                found[name] = (str(tensor.dtype).removeprefix("torch."), _as_numpy(tensor))
        return found if self.rank == 0 else None

    @everywhere
    def save(self, directory: Path) -> None:
        for name, learner in self.training.learners().items():
            _fsdp.save(learner, directory, name, rank=self.rank)

    @everywhere
    def load(self, directory: Path) -> None:
        for name, learner in self.training.learners().items():
            _fsdp.load(learner, directory, name)


def _as_numpy(tensor: Tensor) -> np.ndarray:
    """Arrays cross processes without a copy, tensors do not; numpy has no bfloat16, so its bits go."""
    array: np.ndarray = tensor.view(torch.int16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
    return array
