"""The Ray actor that trains: one FSDP2 rank with its shards of the models."""

import gc
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution._config import ModelConfig, OptimizerConfig, RayConfig
from rlprims.execution._meter import metered
from rlprims.execution._profile import Observed
from rlprims.execution._protocol import UpdateReport
from rlprims.execution.hf import RewardModel, StepTotals, Training, meter_of
from rlprims.execution.hf._adapters import merged, parameters, trained
from rlprims.execution.hf._models import device_of
from rlprims.execution.ray import _fsdp
from rlprims.execution.ray._division import SCORED
from rlprims.execution.ray._wire import Info, Sender, Sums, layers
from rlprims.execution.ray._worker_group import everywhere, first, reads, split, split_by_prompt


class TrainingWorker(Observed):
    """A rank of a pool: its shards of the models that are the pool's roles, all in one process."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.listener: socket.socket | None = None
        self.shards: dict[str, _fsdp.Shard] = {}
        self.sender: Sender | None = None

    @first
    def address(self) -> tuple[str, int]:
        """An address for the ranks to connect: a port of this node's address, and of no other."""
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
        gc.freeze()  # what was imported stays, and no collection needs to walk through it
        torch.set_num_threads(1)
        device = device_of(model).type
        self.lives_on_cpu = cluster.cpu_offload
        _fsdp.join(self.rank, self.size, address, self.listener, device=device, timeout=cluster.call_timeout)
        # Adapters compute in float32 in any model.
        ranks = _fsdp.ranks(cluster, self.size, device, None if model.lora else model.dtype)
        self.training = Training(model, optimizer, ranks=ranks, roles=roles, **options)
        # Whole on every rank: it has no gradients.
        self.reward_model = RewardModel(model) if model.reward and "reward" in roles else None
        self.meter = meter_of(self.training, cluster.mixed_precision)
        return self.training.context_window if "actor" in roles else None

    @split_by_prompt
    @reads(SCORED)
    @metered
    def log_probs(self, batch: DataProto, *, reference: bool = False) -> Tensor:
        return self.training.log_probs(batch, reference=reference)

    @split
    @metered
    def teacher_log_probs(self, batch: DataProto) -> Tensor:
        return self.training.teacher_log_probs(batch)

    @split
    @metered
    def top_tokens(self, batch: DataProto, size: int) -> Tensor:
        return self.training.top_tokens(batch, size)

    @split
    @metered
    def teacher_top(self, batch: DataProto, size: int) -> DataProto:
        return self.training.teacher_top(batch, size)

    @everywhere
    def probe(self, batch: DataProto) -> Tensor:
        """Log-probs of the same rows on every rank, at temperature 1, as an engine scores a prompt."""
        return self.training.log_probs(batch, temperature=1.0)

    @split_by_prompt
    @reads(SCORED)
    @metered
    def entropies(self, batch: DataProto) -> Tensor:
        return self.training.entropies(batch)

    @split
    @reads(SCORED)
    @metered
    def values(self, batch: DataProto) -> Tensor:
        return self.training.values(batch)

    @split
    @metered
    def reward_scores(self, batch: DataProto) -> Tensor:
        if self.reward_model is None:
            raise ValueError("no reward model was loaded: set model.reward")
        return self.reward_model.scores(batch)

    @split_by_prompt
    @reads(None)
    @metered
    def update(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        return self.training.update(batch, algorithm, totals)

    @split
    @reads(None)
    @metered
    def update_critic(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        return self.training.update_critic(batch, algorithm, totals)

    @everywhere
    def time_all_reduce(self, size: int) -> tuple[str, float, bool]:
        """The backend, the seconds of a sum of so many bytes over all ranks, and whether it is right."""
        return _fsdp.time_all_reduce(size, self.training.device)

    @everywhere
    @metered
    def adapters(self) -> dict[str, tuple[str, np.ndarray]] | None:
        """Of the policy, by name, each with its dtype; rank 0 alone answers with them."""
        found = {name: _fsdp.whole(parameter) for name, parameter in trained(self.training.policy.module).items()}
        if self.rank != 0:
            return None
        return {name: (str(x.dtype).removeprefix("torch."), _as_numpy(x)) for name, x in found.items()}

    @everywhere
    @metered
    def snapshot(self) -> None:
        """Keep this rank's shards of the policy: engines get these until the next snapshot."""
        module: Any = self.training.policy.module
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward the outermost parameters may be whole
        self.shards = {
            name: _fsdp.shard_of(parameter, copy=parameter.requires_grad)
            for name, parameter in parameters(module).items()
        }

    @first
    def listen(self, timeout: float) -> tuple[str, int]:
        """Where engines connect for the next :meth:`send_weights`."""
        import ray

        self.sender = Sender(ray.util.get_node_ip_address(), timeout)
        return self.sender.address

    @everywhere
    @metered
    def send_weights(self, receivers: int, dtype: str | None) -> Sums | None:
        """The snapshot to all receivers, a layer at a time; rank 0 answers with the checksums of what it sent.

        A rank that sends nothing takes part in gathering, and so does rank 0 when the transfer has failed.
        """
        module = self.training.policy.module
        parts = layers(list(self.shards))
        failure, sums, sender = None, Sums(), self.sender if self.rank == 0 else None
        if sender is not None:
            self.sender = None
        infos: list[list[Info]] = [[] for _ in parts]
        for number, names in enumerate(parts):
            state = {name: self.shards[name].whole() for name in names}
            if sender is None or failure is not None:
                continue
            tensors = merged(module, state)
            try:
                if number == 0:
                    infos = [self._infos(part, dtype) for part in parts]
                    sender.connect(receivers, infos)
                sums |= sender.send(infos[number], [tensors[info.name] for info in infos[number]])
            except Exception as error:
                failure = error
        if sender is None:
            return None
        try:
            if failure is not None:
                raise failure
            sender.finish()
        finally:
            sender.close()
        return sums

    def _infos(self, names: list[str], dtype: str | None) -> list[Info]:
        """Of the plain model's tensors that :func:`merged` makes of these."""
        plain = {name: self.shards[name] for name in names if ".lora_" not in name}
        return [
            Info(
                name.replace(".base_layer.", "."),
                dtype or str(shard.local.dtype).removeprefix("torch."),
                list(shard.local.shape if shard.of is None else shard.of.shape),
            )
            for name, shard in plain.items()
        ]

    @everywhere
    def offload(self) -> None:
        """Release the device: move models and optimizers to the CPU, if they are not there."""
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
        frozen = (
            self.training.reference,
            self.reward_model.module if self.reward_model else None,
            *self.training.teachers.values(),
        )
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
