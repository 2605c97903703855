"""Metrics reach TensorBoard's and W&B's own files, without a network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlprims.trainer.config import Config
from rlprims.trainer.session import start
from tests.trainer.runs import metrics_of


@pytest.mark.slow
def test_tensorboard_has_what_metrics_has(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = load(settings, "steps=3", "log_to=[tensorboard]")
    start(config, console)
    events = EventAccumulator(str(config.run_dir / "tensorboard"))
    events.Reload()
    lengths = [line["length"] for line in metrics_of(config.run_dir) if line["kind"] == "train"]
    assert [event.value for event in events.Scalars("train/length")] == pytest.approx(lengths)
    assert events.Scalars("eval/sampled/acc")


@pytest.mark.slow
def test_wandb_writes_offline(load: Callable[..., Config], settings: dict[str, Any], console: Console) -> None:
    config = load(settings, "steps=2", "log_to=[wandb]")
    start(config, console)
    (log,) = Path(config.run_dir / "wandb").glob("offline-run-*/*.wandb")
    assert log.stat().st_size > 0
