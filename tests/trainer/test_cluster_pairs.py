"""A table of settings in which every pair meets, on Ray: each run is the local one's, or is refused before Ray starts.

Ranks and engines are started once for each shape; a load gives them back as they were at their start.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlprims.trainer import session
from rlprims.trainer.config import Config
from tests import tiny
from tests.pairwise import Combination, cover
from tests.trainer.test_pairs import SAME, assert_equal, of_run

pytestmark = pytest.mark.ray
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "merged": {"lora": {"rank": 4}},
    "adapter": {"lora": {"rank": 4, "sync": "adapter"}},
    "teacher": {},
}
SHAPE: dict[str, tuple[Any, ...]] = {
    "kind": tuple(KINDS),
    "engines": (1, 2),
    "ranks": (1, 2),
    "tensor_parallel": (1, 2),  # 1: the engine of transformers; 2: vLLM
    # Groups that go on through updates have no fixed weights: there the learning rate is so small that all are equal.
    "weights": ("change", "stay"),
}
SHAPES = cover(SHAPE, lambda part: True)
SETTINGS = SHAPE | {
    "samples": ("responses", "stream", "episodes", "streamed episodes"),
    "max_staleness": (0, 1, 2),
    "resume": (False, True),
    "replay": (False,),
}
REFUSED = {
    (("samples", "responses"), ("max_staleness", 2)): "max_staleness: 2 needs stream: true",
    (("samples", "episodes"), ("max_staleness", 2)): "max_staleness: 2 needs stream: true",
    (("kind", "adapter"), ("max_staleness", 2)): r"max_staleness: 2 needs model.lora.sync: merged",
    (("replay", True), ("max_staleness", 2)): "max_staleness: 2 cannot replay a run",
}
"""Pairs that a config cannot have, each with the line that says so."""


def allowed(part: Combination) -> bool:
    started = any(all(shape[name] == part.get(name, shape[name]) for name in shape) for shape in SHAPES)
    is_still = part.get("max_staleness") != 2 or part.get("weights", "stay") == "stay"
    return started and is_still and not any(set(pair) <= part.items() for pair in REFUSED)


def shape_of(row: Combination) -> tuple[Any, ...]:
    return tuple(row[name] for name in SHAPE)


# A replay asks no engine, so its pairs are its own, on one shape.
REPLAYS = {**SETTINGS, **{name: (value,) for name, value in SHAPES[0].items()}, "replay": (True,)}
TABLE = sorted([*cover(SETTINGS, allowed), *cover(REPLAYS, allowed)], key=lambda row: str(shape_of(row)))


def runs(table: list[Combination]) -> Iterator[Any]:
    """Parameters: CI runs each row with a value that no row before it has; a release asks for every pair."""
    met = set[tuple[str, Any]]()
    for row in table:
        is_new = bool(row.items() - met)
        met |= row.items()
        marks = () if is_new else pytest.mark.release
        yield pytest.param(row, marks=marks, id="-".join(str(value) for value in row.values()))


def settings_of(row: Combination, settings: dict[str, Any], teacher: Path) -> dict[str, Any]:
    data, preset = settings["data"] | {"eval": None}, "opd" if row["kind"] == "teacher" else "grpo"
    if "episodes" in row["samples"]:
        data["environment"] = "tests.trainer.environments.Digits"
        settings = settings | {"verifier": None, "episode_limits": {"turns": 3}}
    correction = {} if preset == "opd" else {"corrections": ["rlprims.corrections.tis"]}
    return settings | {
        "steps": 2,
        "prompts_per_generation": None,
        "algorithm": {"preset": preset, "group_size": 3, **correction},
        "model": settings["model"] | KINDS[row["kind"]] | {"teacher": str(teacher), "device": "cpu"},
        "data": data,
        "optimizer": {"lr": 1e-12 if row["weights"] == "stay" else 1e-4, "eps": 1e-4},
        "stream": "stream" in row["samples"],
        "max_staleness": row["max_staleness"],
        "checkpoint": {"every": 1},
        "execution": "ray",
        "ray": {
            "rollout_workers": row["engines"],
            "training_workers": row["ranks"],
            "engine": "hf" if row["tensor_parallel"] == 1 else "vllm",
            "tensor_parallel_size": row["tensor_parallel"],
            "kv_cache_bytes": 64 << 20,
            "start_timeout": 480.0,
            "call_timeout": 240.0,
            "training_timeout": 240.0,
        },
    }


class Shared:
    """The execution of one shape, which runs share: its end is not that of a run."""

    def __init__(self, execution: Any, start: Path) -> None:
        self.execution, self.start = execution, start
        execution.save(start)()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.execution, name)

    def close(self) -> None:
        self.execution.load(self.start)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("teacher"), seed=1)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """What builds the execution of a config, in place of :mod:`rlprims.trainer.session`'s own."""
    from rlprims.execution.ray._cluster import connect

    connect(None, cpus=64)
    kept: dict[Any, Shared] = {}
    build = session._backend
    with ExitStack() as held:

        def backend(config: Config, *args: Any) -> Any:
            if config.execution == "local":
                return build(config, *args)
            key = repr((config.ray, config.model.lora, config.optimizer, config.algorithm.name))
            if key not in kept:
                held.close()
                kept.clear()
                kept[key] = Shared(build(config, *args), tmp_path_factory.mktemp("start"))
                held.callback(kept[key].execution.close)
            return kept[key]

        yield backend


@pytest.mark.parametrize("row", runs(TABLE))
def test_a_run_is_the_local_one(
    row: Combination,
    settings: dict[str, Any],
    teacher: Path,
    load: Callable[..., Config],
    console: Console,
    tmp_path: Path,
    started: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "_backend", started)
    monkeypatch.setattr(session, "draw_curves", lambda runs, out: out)  # the slowest part of a run
    wanted, one, many = settings_of(row, settings, teacher), tmp_path / "local", tmp_path / "ray"
    # Of groups that overtake each other those of a longer run are some.
    steps = 3 if row["max_staleness"] == 2 else 2
    theirs = of_run(load(wanted, f"run_dir={one}", "execution=local", f"steps={steps}"), console, resumed=False)
    replay = (f"replay={one}",) if row["replay"] else ()
    ours = of_run(load(wanted, f"run_dir={many}", *replay), console, resumed=row["resume"])
    if row["max_staleness"] < 2:
        assert_equal(ours, theirs)
        return
    samples = {sample["sample_id"]: sample for sample in theirs.rows}
    assert [line["step"] for line in ours.metrics] == [1, 2]
    for sample in ours.rows:
        assert [sample[name] for name in SAME[2:]] == [samples[sample["sample_id"]][name] for name in SAME[2:]]


@pytest.mark.parametrize(("pair", "line"), REFUSED.items(), ids=str)
def test_what_cannot_meet_is_refused_before_ray_starts(
    pair: tuple[tuple[str, Any], ...], line: str, settings: dict[str, Any], load: Callable[..., Config], tmp_path: Path
) -> None:
    row = {
        "samples": "stream",
        "weights": "stay",
        "replay": False,
        **dict.fromkeys(("engines", "ranks", "tensor_parallel"), 1),
    }
    wanted = settings_of({"kind": "whole", **row, **dict(pair)}, settings, tmp_path)
    replay = ("replay=runs/other",) if ("replay", True) in pair else ()
    with pytest.raises(ValueError, match=line) as refused:
        load(wanted, *replay)
    assert len(str(refused.value).splitlines()) == 1
