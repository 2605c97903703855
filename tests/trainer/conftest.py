"""A run small enough to repeat in a second, and ways to start one."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from rlprims.trainer.config import Config, load_config
from tests import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_jsonl(tmp_path_factory.mktemp("data") / "sums.jsonl", tiny.sums(20))


@pytest.fixture
def settings(model: Path, questions: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "run_dir": str(tmp_path / "run"),
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


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    def write(values: dict[str, Any]) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def load(write_config: Callable[[dict[str, Any]], Path]) -> Callable[..., Config]:
    return lambda values, *overrides: load_config(write_config(values), overrides)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120)
