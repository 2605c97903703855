"""The best evaluation: its checkpoint stays, and a run ends when it has what it wants or waited long enough."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims.data_proto import DataProto
from rlprims.runs.best_checkpoint import Best
from rlprims.trainer.config import Config
from rlprims.trainer.evaluation import metrics_of
from rlprims.trainer.session import start


def seen(best: Best, *values: float) -> list[bool]:
    return [best.record(step, {"acc": value}) for step, value in enumerate(values, 1)]


def test_the_first_largest_is_best_and_patience_is_counted_from_it(tmp_path: Path) -> None:
    best = Best("acc", tmp_path / "best.json", stop_at=None, patience=2)
    assert not best.record(0, {"acc": 9.0}), "there is no checkpoint of the model before training"
    assert seen(best, 0.5, 0.7, 0.7) == [True, True, False]
    assert not best.should_stop
    assert best.record(4, {"acc": 0.6}) is False
    assert best.should_stop
    assert best.stop_reason == "acc is 0.7 at step 2, 2 evaluations without a larger one"
    assert json.loads((tmp_path / "best.json").read_text()) == {"metric": "acc", "value": 0.7, "step": 2}


def test_a_run_that_goes_on_knows_what_was_best_until_then(tmp_path: Path) -> None:
    first = Best("acc", tmp_path / "best.json", stop_at=0.9, patience=None)
    assert seen(first, 0.5, 0.95) == [True, True]
    assert first.should_stop
    again = Best("acc", tmp_path / "best.json", stop_at=0.99, patience=None)
    again.truncate_after(2)
    assert (again.value, again.step, again.should_stop) == (0.95, 2, False)
    earlier = Best("acc", tmp_path / "best.json", stop_at=0.99, patience=None)
    earlier.truncate_after(1)
    assert earlier.step is None
    assert not (tmp_path / "best.json").exists()


def test_a_metric_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"evaluation.best is 'acc'; an evaluation has \['loss'\]"):
        Best("acc", tmp_path / "b", stop_at=None, patience=None).record(1, {"loss": 1.0})


def test_best_without_a_metric_does_nothing(tmp_path: Path) -> None:
    best = Best(None, tmp_path / "b", stop_at=None, patience=None)
    assert not best.record(1, {})
    assert not best.should_stop


@pytest.mark.slow
def test_a_run_keeps_its_best_and_ends_when_it_has_enough(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    """Length is what this evaluation has plenty of: the first one is enough, four steps before the end."""
    evaluation = {"every": 2, "samples": 1, "limit": 2, "best": "sampled/length", "stop_at": 0.1}
    config = load(settings | {"evaluation": evaluation, "checkpoint": {"every": 100, "keep": 1}})
    assert start(config, console) == 0
    assert [path.name for path in sorted((config.run_dir / "checkpoints").iterdir())] == ["step_000002"]
    assert json.loads((config.run_dir / "summary.json").read_text())["steps"] == 2
    assert "ended after step 2: sampled/length is" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_best_checkpoint_outlives_the_newer_ones(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    """A metric that is the same throughout is best at once."""
    evaluation = {"every": 1, "samples": 1, "limit": 1, "best": "sampled/unscored"}
    config = load(settings | {"steps": 3, "evaluation": evaluation, "checkpoint": {"every": 1, "keep": 1}})
    assert start(config, console) == 0
    names = [path.name for path in sorted((config.run_dir / "checkpoints").iterdir())]
    assert names == ["step_000001", "step_000003"]


def test_a_limit_needs_a_metric(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="write best: sampled/acc"):
        load(settings | {"evaluation": {"patience": 2}})


def test_pass_at_k_is_unbiased() -> None:
    """Two of four are right: of the six pairs one is wrong throughout. All of Chen et al.'s ends, too."""
    scores = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1])
    tensors = {"scores": scores, "response_mask": torch.ones(12, 1, dtype=torch.bool), "ended": torch.zeros(12).long()}
    tensors["sample_id"] = torch.arange(12)
    rows = DataProto.from_dict(tensors=tensors, non_tensors={"data_source": ["x"] * 12})
    got = metrics_of(rows, 4)
    assert got["pass@2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert got["acc"] == 0.5
    for samples, named in ((1, []), (2, []), (4, [2]), (12, [2, 4, 8])):
        assert [k for k in range(13) if f"pass@{k}" in metrics_of(rows, samples)] == named
