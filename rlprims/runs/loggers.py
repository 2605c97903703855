"""Loggers beside ``metrics.jsonl``, by name or import path. A package is imported only if ``log_to`` names it."""

import importlib
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rlprims._extras import hint
from rlprims._json import beside
from rlprims.algorithms import import_path
from rlprims.runs.config import RunConfig


class Logger(NamedTuple):
    """What a name of ``log_to`` opens. A class of your own has such methods; it need not have ``log_table``."""

    log: Callable[[dict[str, float], int], object]
    close: Callable[[], object]
    log_table: Callable[[dict[str, list[Any]], int], object] | None = None


def check_loggers(config: RunConfig) -> None:
    """Check the packages and classes before anything is loaded or written."""
    tables = {"mlflow", "trackio", "wandb"}
    for name in config.log_to:
        try:
            if name in _OPENERS:
                importlib.import_module(name)
            elif not all(hasattr(import_path(name), method) for method in ("log", "close")):
                raise ValueError("expected a class with the methods log(metrics, step) and close()")
            elif hasattr(import_path(name), "log_table"):
                tables.add(name)
        except (ImportError, ValueError) as error:
            install = hint("track") if name in ("tensorboard", "wandb") else f"pip install {name}"
            fix = f"{install}, or leave it out of log_to" if name in _OPENERS else f"or use {', '.join(_OPENERS)}"
            raise ValueError(f"log_to: {name}: {error}: {fix}") from None
    if getattr(config, "log_samples", 0) and not tables & {*config.log_to}:
        raise ValueError(f"log_samples: nothing in log_to has tables: add one of {', '.join(sorted(tables))}")


def open_loggers(config: RunConfig, run: Path) -> list[Logger]:
    """A logger for each of ``log_to``."""
    settings = config.model_dump(mode="json")
    names = {None: {}, **beside(__file__, "metric_names.json")}[config.metric_names]

    def renamed(logger: Logger) -> Logger:
        log, table = logger.log, getattr(logger, "log_table", None)
        return Logger(
            lambda found, step: log({names.get(k, k): v for k, v in found.items()}, step), logger.close, table
        )

    return [renamed((_OPENERS.get(name) or import_path(name))(run, settings)) for name in config.log_to]


def _tensorboard(run: Path, settings: dict[str, Any]) -> Logger:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(log_dir=str(run / "tensorboard"))

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Logger(log, writer.close)


def _session(package: str, run: Path, settings: dict[str, Any]) -> Logger:
    """wandb, swanlab and trackio have the same methods. The first two are offline unless the environment says more."""
    modes = {"mode": os.environ.get(f"{package.upper()}_MODE", "offline")} if package != "trackio" else {}
    folder = {"wandb": {"dir": str(run)}, "swanlab": {"log_dir": str(run / "swanlab")}}.get(package, {})
    module = importlib.import_module(package)
    session = module.init(project="rlprims", name=run.name, config=settings, **modes, **folder)

    def log_table(table: dict[str, list[Any]], step: int) -> None:
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        session.log({"samples": module.Table(columns=list(table), data=rows)}, step)

    return Logger(session.log, session.finish, log_table if hasattr(module, "Table") else None)


def _mlflow(run: Path, settings: dict[str, Any]) -> Logger:
    import mlflow

    mlflow.set_experiment("rlprims")
    mlflow.start_run(run_name=run.name)
    mlflow.log_dict(settings, "config.json")

    def log(metrics: dict[str, float], step: int) -> None:  # its names have no @
        mlflow.log_metrics({re.sub(r"[^\w .:/-]", "_", name): value for name, value in metrics.items()}, step)

    return Logger(log, mlflow.end_run, lambda table, step: mlflow.log_table(table, f"samples_{step:06d}.json"))


_OPENERS: dict[str, Callable[[Path, dict[str, Any]], Logger]] = {
    **{"mlflow": _mlflow, "tensorboard": _tensorboard},
    **{name: partial(_session, name) for name in ("swanlab", "trackio", "wandb")},
}
