"""The verifier in worker processes: the same run, and limits that hold."""

from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from rlprims.trainer.config import Config
from tests.trainer.test_loop import run


@pytest.mark.slow
def test_scoring_with_and_without_workers_is_the_same_run(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    def history(workers: int) -> list[dict[str, float]]:
        _, steps = run(load(settings, "steps=2", f"scoring.workers={workers}"), console)
        return [{k: v for k, v in step.metrics.items() if not k.startswith("time/")} for step in steps]

    assert history(0) == history(1)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_verifier_for_each_data_source(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, workers: int
) -> None:
    table = {"fn": "rlprims.rewards.verifiers.by_source", "table": {"su*": settings["verifier"]}}
    config = load(settings | {"verifier": table, "steps": 1}, f"scoring.workers={workers}")
    assert Config.model_validate(config.model_dump(mode="json")) == config
    _, steps = run(config, console)
    assert set(steps[0].batch["scores"].tolist()) == {0.0, 1.0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:tests.trainer.verifiers")
def test_scoring_counts_failures_by_cause(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    small = {"algorithm": {"preset": "rloo", "group_size": 2}, "steps": 3, "scoring": {"workers": 1, "seconds": 0.2}}
    config = load(settings | small | {"verifier": "tests.trainer.verifiers.raises_or_hangs"})
    _, steps = run(config, console)
    failed = [str(f) for step in steps for rows, _ in step.dropped for f in rows["failure"] if f is not None]
    for cause in ("raised RuntimeError", "timeout"):
        counted = sum(step.metrics.get(f"failures/{cause}", 0) for step in steps)
        assert counted == sum(f.startswith(cause) for f in failed) > 0
    for step in steps:
        assert step.batch["scores"].isfinite().all()


@pytest.mark.parametrize("name", ["math", "by_source"])
def test_sympy_in_the_trainers_process_is_warned_about(
    load: Callable[..., Config], settings: dict[str, Any], name: str
) -> None:
    settings |= {"verifier": f"rlprims.rewards.verifiers.{name}"}
    assert any("set scoring.workers" in warning for warning in load(settings).warnings())
    assert not any("set scoring.workers" in warning for warning in load(settings, "scoring.workers=2").warnings())
