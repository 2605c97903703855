"""The settings of a small run, starting it, and reading it back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlprims.cli import main
from rlprims.execution import Finish
from rlprims.runs.checkpoint import begin_checkpoint


def rlprims(*arguments: str | Path) -> None:
    """A command in this process: what another one imports takes four seconds of a core."""
    assert main([*map(str, arguments)]) == 0


def small_run(model: Path, questions: Path, run_dir: Path) -> dict[str, Any]:
    """Six steps in a second, with groups that are dropped and groups that are put by."""
    return {
        "run_dir": str(run_dir),
        "steps": 6,
        "prompts_per_step": 4,
        "prompts_per_generation": 6,
        "algorithm": {
            "preset": "dapo",
            "group_size": 3,
            "max_length": 8,
            "buffer_length": 4,
            "filter": {"max_generation_batches": 50},
        },
        "model": {"path": str(model), "max_tokens_per_micro_batch": 128},
        "data": {"train": str(questions), "eval": str(questions)},
        "verifier": "tests.trainer.verifiers.has_a_digit",
        "sampling": {"max_new_tokens": 8},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
        "evaluation": {"every": 3, "samples": 2, "limit": 5},
        "checkpoint": {"every": 2, "keep": 3},
    }


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of a run without what the machine decides: seconds and memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]


def save_checkpoint(
    directory: Path, step: int, write: Callable[[Path], Finish | None], *, keep: int, best: int | None = None
) -> Path:
    """A whole checkpoint, which a run completes in the background."""
    return begin_checkpoint(directory, step, write, keep=keep, best=best)()
