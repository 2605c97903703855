"""A table of settings in which every pair meets: each run is its plain twin's, or is refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any, NamedTuple

import pytest
from _pytest.mark import ParameterSet
from rich.console import Console

from rlprims.runs.directory import RunDirectory
from rlprims.runs.records import recorded_steps
from rlprims.trainer.config import Config
from rlprims.trainer.session import resume, start
from tests.pairwise import Combination, cover
from tests.trainer.runs import metrics_of

TIS = ["rlprims.corrections.tis"]
FAMILIES: dict[str, dict[str, Any]] = {
    "grpo": {"corrections": TIS},
    "ppo": {"corrections": TIS, "mini_batches": 2, "epochs": 2},
    "dapo": {"corrections": TIS, "max_length": 8, "buffer_length": 4, "filter": {"max_generation_batches": 50}},
    "gspo": {},
    "reinforce_pp": {"corrections": TIS},
    "remax": {"corrections": TIS},
    "opd": {},
    "turn_grpo": {"corrections": TIS},
}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "packing": (True, False),
    "fused_head": (False, True),
    "lora": (False, True),
    "kept": (False, True),
    "episodes": (False, True),
    "stream": (False, True),
    "max_staleness": (0, 1, 2),
    "old_groups": (False, True),
    "resume": (False, True),
}
REFUSED = {
    (("family", "remax"), ("stream", True)): "stream: true samples no greedy responses",
    (("family", "turn_grpo"), ("episodes", False)): "which only an environment gives: set data.environment",
    (("stream", False), ("max_staleness", 2)): "max_staleness: 2 needs stream: true",
    (("family", "gspo"), ("old_groups", True)): "needs importance weights, not in gspo: add corrections",
    (("family", "opd"), ("old_groups", True)): "needs importance weights, not in opd: add corrections",
}
"""Pairs that a config cannot have, each with the line that says so."""
SAME = ("step", "sample_id", "response_ids", "score", "status", "ended")
"""What is equal of two rows; other numbers round as their batch does."""


def allowed(part: Combination) -> bool:
    goes_on = part.get("max_staleness") == 2  # so it streams, which remax cannot; and see test_old_groups
    return not any(set(pair) <= part.items() for pair in REFUSED) and not (
        goes_on and (part.get("family") == "remax" or part.get("old_groups"))
    )


TABLE = cover(SETTINGS, allowed)


def with_every_value_once() -> list[ParameterSet]:
    """The table; its rows that have a new value run in CI, the others before a release."""
    seen, rows = set[tuple[str, Any]](), list[ParameterSet]()
    for row in TABLE:
        rows.append(pytest.param(row, marks=pytest.mark.release if row.items() <= seen else ()))
        seen |= row.items()
    return rows


def settings_of(row: Combination, settings: dict[str, Any]) -> dict[str, Any]:
    name, data = row["family"], settings["data"] | {"eval": None}
    changes: dict[str, Any] = {"verifier": settings["verifier"]}
    if row["episodes"]:
        data["environment"] = "tests.trainer.environments.Digits"
        changes = {"verifier": None, "episode_limits": {"turns": 3}}
    model = {name: row[name] for name in ("packing", "fused_head")} | {"lora": {"rank": 4} if row["lora"] else None}
    return settings | {
        **changes,
        "steps": 2,
        "prompts_per_generation": None,
        "algorithm": {"preset": name, "group_size": 3, **FAMILIES[name]},
        "model": settings["model"] | model,
        "data": data,
        "sampling": settings["sampling"] | ({"top_p": 0.8, "top_k": 12} if row["kept"] else {}),
        "optimizer": settings["optimizer"] | {"eps": 1e-4},  # of a gradient that is all rounding Adam makes little
        "stream": row["stream"],
        "max_staleness": row["max_staleness"],
        "old_groups": {"share": 0.5 if row["old_groups"] else 0.0},
        "checkpoint": {"every": 1},
    }


def plain(row: Combination) -> Combination:
    """The twin: without what changes no number. A stream replaces a dropped group at once, so there it stays."""
    streams = row["max_staleness"] == 2 or (row["stream"] and row["family"] == "dapo")
    return row | {"packing": False, "fused_head": False, "stream": streams, "resume": False}


class Ran(NamedTuple):
    """What a run wrote."""

    metrics: list[dict[str, Any]]
    rows: list[dict[str, Any]]


def of_run(config: Config, console: Console, *, resumed: bool) -> Ran:
    """A run; ``resumed``: one that ended after its first step, and was resumed."""
    path = config.run_dir
    assert start(config, console) == 0
    if resumed:
        broken = path.with_name(f"{path.name}-resumed")
        copytree(path, broken)
        rmtree(broken / "checkpoints" / "step_000002")
        path, run = broken, RunDirectory.open(broken)
        assert resume(run, run.config(Config), console) == 0
    rows = [json.loads(row) for step in recorded_steps(path).values() for row in step.read_text().splitlines()]
    return Ran(metrics_of(path), rows)


def assert_equal(ours: Ran, theirs: Ran) -> None:
    for mine, other in zip(ours.metrics, theirs.metrics, strict=True):
        assert mine.pop("kind") == other.pop("kind")
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5, nan_ok=True)
    for mine, other in zip(ours.rows, theirs.rows, strict=True):
        assert [mine[name] for name in SAME] == [other[name] for name in SAME]


@pytest.mark.slow
@pytest.mark.parametrize("row", with_every_value_once(), ids=lambda row: "-".join(str(value) for value in row.values()))
def test_a_run_is_its_plain_twins(
    row: Combination, settings: dict[str, Any], load: Callable[..., Config], console: Console, tmp_path: Path
) -> None:
    ours, theirs = (
        of_run(load(settings_of(each, settings), f"run_dir={tmp_path / name}"), console, resumed=each["resume"])
        for name, each in (("ours", row), ("theirs", plain(row)))
    )
    assert_equal(ours, theirs)


@pytest.mark.parametrize(("pair", "line"), REFUSED.items(), ids=str)
def test_what_cannot_meet_is_refused_in_a_line(
    pair: tuple[tuple[str, Any], ...], line: str, settings: dict[str, Any], load: Callable[..., Config]
) -> None:
    with pytest.raises(ValueError, match=line) as refused:
        load(settings_of(TABLE[0] | dict(pair), settings))
    assert len(str(refused.value).splitlines()) == 1
