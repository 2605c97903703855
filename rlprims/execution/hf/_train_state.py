"""A model in training: its optimizer, its learning-rate schedule, and its optimizer step on micro-batches."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlprims.controllers import Ema
from rlprims.execution import OptimizerConfig, UpdateReport
from rlprims.execution.hf._adapters import trained
from rlprims.execution.hf._micro_batches import Part, Ranks, StepTotals
from rlprims.execution.hf._models import restore, save_model
from rlprims.execution.hf._vision import INPUTS, tower
from rlprims.types import Metrics, merge_metrics


def learning_rate(config: OptimizerConfig, update: int, updates: int) -> float:
    """The learning rate of update number ``update`` (from 0) of ``updates``: linear warm-up, then the schedule."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    progress = min(1.0, (update - config.warmup_steps) / max(1, updates - 1 - config.warmup_steps))
    left = {"constant": 1.0, "linear": 1.0 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * left[config.schedule])


class TrainState:
    """A module, its optimizer, and the number of updates so far.

    The optimizer updates float32 weights; a module of 16 bits computes with their rounded values. In bfloat16 an update
    of 1e-6 would be lost, and so would a small gradient in the sum over micro-batches.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig, updates: int) -> None:
        self.module, self.config, self.updates, self.update = module, config, updates, 0
        weights = trained(module)
        masters = {name: x if x.dtype.itemsize > 2 else _master_of(x) for name, x in weights.items()}
        self.masters = list(masters.values())
        self.seeing = [x for x in tower(module).values() if x.requires_grad]
        self.rounded = [(x, masters[name]) for name, x in weights.items() if x is not masters[name]]
        names = _matrices(module, weights) if config.name == "muon" else set()
        matrices = {name: x for name, x in masters.items() if name in names}
        others = {name: x for name, x in masters.items() if name not in names}
        rates: Any = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
        on_gpu = all(x.is_cuda for x in others.values())  # one kernel, without temporaries of the size of the weights
        self.optimizer = torch.optim.AdamW(_groups(others, config), **rates, fused=on_gpu or None)
        self.muon: torch.optim.Muon | None = None
        if matrices:  # match_rms_adamw: Muon's updates are as large as AdamW's, so one learning rate fits both
            options: Any = {"lr": config.lr, "weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
            self.muon = torch.optim.Muon(_groups(matrices, config), **options)

    def step(self) -> tuple[float, float, bool]:
        """Apply the gradients, if finite; returns (gradient norm before clipping, learning rate, skipped)."""
        total = nn.utils.clip_grad_norm_(self.masters, self.config.max_grad_norm)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        lr = learning_rate(self.config, self.update, self.updates)
        skipped = not math.isfinite(norm)
        if not skipped:
            for optimizer in self._optimizers().values():
                for group in optimizer.param_groups:
                    group["lr"] = lr * group.get("share", 1.0)
                optimizer.step()
            self._round()
        self.zero_grad()
        self.update += 1
        return norm, lr, skipped

    @torch.no_grad()
    def _round(self) -> None:
        for weight, master in self.rounded:
            weight.copy_(master)

    def save(self, directory: Path, name: str) -> None:
        save_model(self.module, directory / name, self.module.state_dict())
        for kind, optimizer in self._optimizers().items():
            state = optimizer.state_dict()["state"]
            tensors = {f"{i}.{key}": t.contiguous() for i, slots in state.items() for key, t in slots.items()}
            save_file(tensors, directory / f"{name}_{kind}.safetensors")
        if self.rounded:
            masters = {f"{i}": master.detach() for i, (_, master) in enumerate(self.rounded)}
            save_file(masters, directory / f"{name}_float32.safetensors")
        (directory / f"{name}_optimizer.json").write_text(json.dumps({"update": self.update}))

    def load(self, directory: Path, name: str) -> None:
        restore(self.module, directory / name)
        for kind, optimizer in self._optimizers().items():
            slots: dict[int, dict[str, Any]] = {}
            for key, tensor in load_file(directory / f"{name}_{kind}.safetensors").items():
                index, slot = key.split(".", 1)
                slots.setdefault(int(index), {})[slot] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
        path = directory / f"{name}_float32.safetensors"
        saved = load_file(path) if path.exists() else {}
        with torch.no_grad():
            for i, (weight, master) in enumerate(self.rounded):
                master.copy_(saved.get(f"{i}", weight))
        self._round()
        self.update = json.loads((directory / f"{name}_optimizer.json").read_text())["update"]

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers, by the names that their files have."""
        return {"optimizer": self.optimizer} | ({"muon": self.muon} if self.muon is not None else {})

    def zero_grad(self) -> None:
        for master in self.masters:
            master.grad = None


class Follower(NamedTuple):
    """A reference or a teacher whose weights follow the policy."""

    role: str
    module: nn.Module
    ema: Ema

    def save(self, directory: Path) -> None:
        """Write the model for Hugging Face, and its count of updates."""
        save_model(self.module, directory / self.role, self.module.state_dict())
        (directory / f"{self.role}_ema.json").write_text(json.dumps(self.ema.state_dict()))

    def load(self, directory: Path) -> None:
        restore(self.module, directory / self.role)
        self.ema.load_state_dict(json.loads((directory / f"{self.role}_ema.json").read_text()))


def optimizer_step(
    state: TrainState,
    parts: Iterable[Part],
    totals: StepTotals,
    forward: Callable[[dict[str, Tensor]], tuple[Tensor, Metrics]],
    ranks: Ranks,
) -> UpdateReport:
    """One optimizer step on the sum of the micro-batches' losses. ``forward`` returns loss and metrics of one.

    The report is on the CPU, because its reader may have no other device. Until the end nothing waits for the device.
    """
    losses, metrics, has_images = list[Tensor](), Metrics(), False
    state.zero_grad()  # an exception in the last step may have left gradients
    for part in parts:
        ranks.reduce_next(state.module, part.is_last)
        has_images |= bool(part.data.get(INPUTS))
        part_loss, part_metrics = forward({**part.data, **totals})  # type: ignore[dict-item]
        # Ranks average their gradients. The totals are those of the whole step, so the sum is wanted.
        (part_loss * ranks.size).backward()  # type: ignore[no-untyped-call]
        losses.append(part_loss.detach())
        metrics = merge_metrics(metrics, part_metrics)
    if state.seeing and not ranks.largest(has_images):
        for x in state.seeing:
            x.grad = None  # on ranks it is 0, by which Adam would move the weights
    sent = {
        n: replace(x, **{k: y.to("cpu", non_blocking=True) for k, y in vars(x).items()}) for n, x in metrics.items()
    }
    total = sum(torch.stack(losses).tolist()) if losses else 0.0  # the one wait for all of them
    return UpdateReport(total, *state.step(), sent)


def _master_of(weight: nn.Parameter) -> nn.Parameter:
    """Return a float32 copy of a weight. Each gradient of the weight is added to its gradient when it is computed."""
    master = nn.Parameter(weight.detach().float())

    def take_gradient(weight: Tensor) -> None:
        assert weight.grad is not None
        gradient = weight.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        weight.grad = None

    weight.register_post_accumulate_grad_hook(take_gradient)  # type: ignore[no-untyped-call]
    return master


def _matrices(module: Any, weights: Mapping[str, Tensor]) -> set[str]:
    """The names of the matrices between embedding and head. Muon trains these."""
    ends = [module.get_input_embeddings(), module.get_output_embeddings()]
    ends += [getattr(module, name, None) for name in ("score", "classifier")]
    outside = {id(x) for end in ends if end is not None for x in end.parameters()}
    return {name for name, x in weights.items() if x.dim() == 2 and id(x) not in outside}


def _groups(weights: Mapping[str, Tensor], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameter groups: one for each learning rate, with its ratio to ``lr`` in ``share``."""
    rates = {name: next((r for part, r in config.lr_of.items() if part in name), config.lr) for name in weights}
    groups: dict[float, list[Tensor]] = {}
    for name, x in weights.items():
        groups.setdefault(rates[name], []).append(x)
    if not config.lr_of:
        return [{"params": list(weights.values())}]
    return [{"params": params, "share": rate / config.lr} for rate, params in groups.items()]
