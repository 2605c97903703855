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
from tests.trainer.runs import small_run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_jsonl(tmp_path_factory.mktemp("data") / "sums.jsonl", tiny.sums(20))


@pytest.fixture
def settings(model: Path, questions: Path, tmp_path: Path) -> dict[str, Any]:
    return small_run(model, questions, tmp_path / "run")


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
