"""Loggers beside ``metrics.jsonl``: TensorBoard and W&B. Each package is imported only if ``log_to`` names it."""

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from rlprims._extras import hint
from rlprims.runs.config import RunConfig

Log: TypeAlias = Callable[[int, Mapping[str, float]], None]


def check_loggers(config: RunConfig) -> None:
    """Check the packages before anything is loaded or written."""
    modules = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
    for name in config.log_to:
        try:
            importlib.import_module(modules[name])
        except ImportError as error:
            raise ValueError(f"log_to: {name}: {error}: {hint('track')}, or leave it out of log_to") from None


def open_loggers(config: RunConfig, run: Path) -> list[Log]:
    """One function of (step, metrics) for each of ``log_to``."""
    openers = {"tensorboard": _tensorboard, "wandb": _wandb}
    return [openers[name](config, run) for name in config.log_to]


def _tensorboard(config: RunConfig, run: Path) -> Log:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(run / "tensorboard"))

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def _wandb(config: RunConfig, run: Path) -> Log:
    import wandb

    os.environ.setdefault("WANDB_MODE", "offline")  # offline unless the environment variable says otherwise
    session = wandb.init(project="rlprims", name=run.name, dir=str(run), config=config.model_dump(mode="json"))
    return lambda step, metrics: session.log(dict(metrics), step=step)
