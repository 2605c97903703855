"""Small run directories, made by hand."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.reports.made_runs import MakeRun


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A run directory from its metrics, its rollouts by step, and its config; texts are written as they are."""

    def make(
        name: str = "run",
        *,
        metrics: Sequence[Mapping[str, Any] | str] | None = None,
        rollouts: Mapping[int, Sequence[Mapping[str, Any] | str]] | None = None,
        config: str | None = "algorithm:\n  name: dapo\nseed: 0\n",
        summary: str | None = None,
    ) -> Path:
        run = tmp_path / name
        run.mkdir()
        if config is not None:
            (run / "config.yaml").write_text(config)
        if summary is not None:
            (run / "summary.json").write_text(summary)
        if metrics is not None:
            (run / "metrics.jsonl").write_text(_lines(metrics))
        for step, rows in (rollouts or {}).items():
            (run / "rollouts").mkdir(exist_ok=True)
            (run / "rollouts" / f"step_{step:06d}.jsonl").write_text(_lines(rows))
        return run

    return make


def _lines(rows: Sequence[Mapping[str, Any] | str]) -> str:
    return "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
