"""A model in training: AdamW, its learning rate over time, and the guard against gradients that are not finite."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from rlprims.execution._config import OptimizerConfig
from rlprims.execution.hf._adapters import trained
from rlprims.execution.hf._models import restore, save_model


def learning_rate(config: OptimizerConfig, update: int, updates: int) -> float:
    """The rate of update number ``update`` (from 0) of ``updates``: linear warm-up, then the schedule."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    progress = min(1.0, (update - config.warmup_steps) / max(1, updates - 1 - config.warmup_steps))
    left = {"constant": 1.0, "linear": 1.0 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * left[config.schedule])


class TrainState:
    """A module, its optimizer, and the number of updates so far."""

    def __init__(self, module: nn.Module, config: OptimizerConfig, updates: int) -> None:
        self.module = module
        self.config = config
        self.updates = updates
        self.update = 0
        self.optimizer = torch.optim.AdamW(
            trained(module).values(), lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )

    def step(self) -> tuple[float, float, bool]:
        """Apply the accumulated gradients; returns (gradient norm before clipping, learning rate, skipped).

        If the norm is not finite, weights and moments stay as they are: one such step would make both NaN.
        """
        total = nn.utils.clip_grad_norm_(self.module.parameters(), self.config.max_grad_norm)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        lr = learning_rate(self.config, self.update, self.updates)
        skipped = not math.isfinite(norm)
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.update += 1
        return norm, lr, skipped

    def save(self, directory: Path, name: str) -> None:
        save_model(self.module, directory / name, self.module.state_dict())
        state = self.optimizer.state_dict()
        tensors = {f"{i}.{key}": t.contiguous() for i, slots in state["state"].items() for key, t in slots.items()}
        save_file(tensors, directory / f"{name}_optimizer.safetensors")
        (directory / f"{name}_optimizer.json").write_text(json.dumps({"update": self.update}))

    def load(self, directory: Path, name: str) -> None:
        restore(self.module, directory / name)
        slots: dict[int, dict[str, Any]] = {}
        for key, tensor in load_file(directory / f"{name}_optimizer.safetensors").items():
            index, slot = key.split(".", 1)
            slots.setdefault(int(index), {})[slot] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})
        self.update = json.loads((directory / f"{name}_optimizer.json").read_text())["update"]
