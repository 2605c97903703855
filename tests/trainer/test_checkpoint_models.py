"""Which checkpoints of shards get a Hugging Face model. A run of one process writes its policy as one rank would."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlprims.execution import Finish
from rlprims.execution.local import LocalExecution
from rlprims.runs.checkpoint import damage_of
from rlprims.trainer.config import Config
from rlprims.trainer.session import start


@pytest.mark.slow
@pytest.mark.parametrize(("when", "expected"), [("last", {3, 6}), ("every", {2, 3, 4, 6})])
def test_the_last_and_the_best_or_all(
    load: Callable[..., Config],
    settings: dict[str, Any],
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    expected: set[int],
) -> None:
    save = LocalExecution.save

    def save_shards(self: LocalExecution, directory: Path) -> Finish:
        finish = save(self, directory)
        (directory / "policy").rename(directory / "policy_shards")
        return finish

    monkeypatch.setattr(LocalExecution, "save", save_shards)
    # Nothing is learned, so the first evaluation stays the best.
    settings |= {"optimizer": {"lr": 1e-15}, "checkpoint": {"every": 2, "keep": 4, "hugging_face": when}}
    settings["evaluation"] = {"every": 3, "samples": 2, "limit": 5, "best": "sampled/acc"}
    config = load(settings)
    assert start(config, console) == 0
    assert json.loads((config.run_dir / "best.json").read_text())["step"] == 3
    found = {int(path.name[-6:]): path for path in (config.run_dir / "checkpoints").iterdir()}
    assert found.keys() == {2, 3, 4, 6}
    assert {step for step, path in found.items() if (path / "policy").is_dir()} == expected
    assert all(damage_of(path) is None for path in found.values())
