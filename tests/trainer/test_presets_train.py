"""Every preset trains from its name alone, or is refused in one line before anything is loaded."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from rlprims.algorithms import PRESETS
from rlprims.runs.steps import StepResult
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build

REFUSED = {
    "chord": r"needs \['expert_mask'\], which nothing in a run computes",
    "echo": r"needs \['observation_mask'\], which only an environment gives: set data.environment",
    "luffy": r"needs \['expert_mask'\], which nothing in a run computes",
    "prime": r"needs \['process_rewards'\], which nothing in a run computes",
    "tree_grpo": r"needs \['tree_ids'\], which nothing in a run computes",
    "turn_grpo": r"needs \['turn_ids', 'turn_rewards'\], which only an environment gives: set data.environment",
}
CHANGES: dict[str, dict[str, Any]] = {
    "gdpo": {"verifier": "tests.trainer.verifiers.a_digit_and_a_letter"},
}


def two_steps(config: Config, console: Console) -> list[StepResult]:
    parts = build(config, console)
    trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
    return [trainer.step(), trainer.step()]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRESETS.keys() - REFUSED.keys()))
def test_a_preset_trains(name: str, load: Callable[..., Config], settings: dict[str, Any], console: Console) -> None:
    changes = {"algorithm": name, "prompts_per_generation": None, "steps": 2, **CHANGES.get(name, {})}
    for step in two_steps(load(settings | changes), console):
        assert math.isfinite(step.metrics["loss"])
        assert step.metrics["skipped_updates"] == 0


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_a_preset_that_no_run_can_feed_is_refused(
    name: str, message: str, load: Callable[..., Config], settings: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=message):
        load(settings | {"algorithm": name})
