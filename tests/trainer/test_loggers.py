"""Metrics and samples reach the loggers' own files, without a network."""

import json
import os
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import rlprims
from rlprims.trainer.config import Config
from rlprims.trainer.session import start
from tests.trainer.runs import metrics_of

COLUMNS = ["prompt", "response", "scores", "advantage"]


@pytest.mark.slow
def test_tensorboard_has_what_metrics_has(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = load(settings, "steps=3", "log_to=[tensorboard]")
    start(config, console)
    events = EventAccumulator(str(config.run_dir / "tensorboard"))
    events.Reload()
    lengths = [line["length"] for line in metrics_of(config.run_dir) if line["kind"] == "train"]
    assert [event.value for event in events.Scalars("train/length")] == pytest.approx(lengths)
    assert events.Scalars("eval/sampled/acc")


@pytest.mark.slow
def test_wandb_writes_offline(load: Callable[..., Config], settings: dict[str, Any], console: Console) -> None:
    config = load(settings, "steps=2", "log_to=[wandb]", "log_samples=2")
    start(config, console)
    (log,) = Path(config.run_dir / "wandb").glob("offline-run-*/*.wandb")
    assert log.stat().st_size > 0
    (table,) = list(Path(config.run_dir / "wandb").glob("offline-run-*/files/media/table/samples_*1_*.json"))[:1]
    assert json.loads(table.read_text())["columns"] == COLUMNS


def lines_of(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run_dir / "lines.jsonl").read_text().splitlines()]


def test_a_class_of_the_user_gets_every_line(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    config = load(settings, "steps=2", "log_to=tests.trainer.loggers.Lines")
    start(config, console)
    first, *lines, last = lines_of(config)
    assert first["settings"] == config.model_dump(mode="json") | {"data": first["settings"]["data"]}
    assert last == {"closed": True}
    kept = metrics_of(config.run_dir)
    assert len(lines) == len(kept)
    for line, known in zip(lines, kept, strict=True):
        kind, step = known.pop("kind"), known.pop("step")
        assert line["step"] == step
        assert {f"{kind}/{name}": value for name, value in known.items()}.items() <= line["metrics"].items()


def test_a_table_has_the_first_samples_of_each_step(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    """The mean advantage of a response is that of its tokens, which here have one advantage each."""
    config = load(settings, "steps=2", "log_to=tests.trainer.loggers.Tables", "log_samples=2")
    start(config, console)
    tables = {line["step"]: line["table"] for line in lines_of(config) if "table" in line}
    assert sorted(tables) == [1, 2]
    for step, table in tables.items():
        assert list(table) == COLUMNS
        recorded = (config.run_dir / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()
        trained = [sample for line in recorded if (sample := json.loads(line)).get("status") == "trained"]
        for prompt, response, score, advantage in zip(*table.values(), strict=True):
            (sample, *_) = (s for s in trained if (s["prompt"], s["response"]) == (prompt, response))
            assert score == sample["score"]
            assert advantage == pytest.approx(sum(sample["advantages"]) / len(sample["advantages"]))


def test_a_logger_is_closed_after_an_error_too(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    filtered = {"algorithm": settings["algorithm"] | {"filter": {"max_generation_batches": 1}}}
    config = load(
        settings | filtered | {"verifier": "tests.trainer.verifiers.always_right"},
        *("log_to=tests.trainer.loggers.Lines", "data.eval=null"),
    )
    with pytest.raises(ValueError, match="groups after 1 generation batches"):
        start(config, console)
    assert lines_of(config)[-1] == {"closed": True}


@pytest.mark.slow
@pytest.mark.parametrize("package", ["mlflow", "swanlab", "trackio", "comet_ml"])
def test_other_packages_have_metrics_and_samples(
    write_config: Callable[..., Path], settings: dict[str, Any], tmp_path: Path, package: str
) -> None:
    """In a process of its own, whose environment they read when they are imported."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    tables = {} if package == "swanlab" else {"log_samples": 2}
    name = "tests.trainer.loggers.Comet" if package == "comet_ml" else package
    path = write_config(settings | {"steps": 2, "log_to": name, **tables})
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    environment |= {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "rlprims", "train", str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert FOUND[package](tmp_path) >= {"train/length", "eval/sampled/acc"}


def of_mlflow(folder: Path) -> set[str]:
    (table,) = folder.rglob("samples_000002.json")
    assert json.loads(table.read_text())["columns"] == COLUMNS
    with sqlite3.connect(folder / "mlflow.db") as known:
        rows = known.execute("select key, value, step from metrics").fetchall()
    lengths = {line["step"]: line["length"] for line in metrics_of(folder / "run") if line["kind"] == "train"}
    assert {step: value for key, value, step in rows if key == "train/length"} == pytest.approx(lengths)
    return {key for key, _, _ in rows}


def of_trackio(folder: Path) -> set[str]:
    with sqlite3.connect(folder / "trackio/rlprims.db") as known:
        rows = [json.loads(row) for (row,) in known.execute("select metrics from metrics")]
    (table, *_) = (row["samples"] for row in rows if "samples" in row)
    assert "trackio.table" in json.dumps(table)
    return {name for row in rows for name in row}


def of_swanlab(folder: Path) -> set[str]:
    (log,) = (folder / "run/swanlab").rglob("*.swanlab")
    return {name for name in ("train/length", "eval/sampled/acc") if name.encode() in log.read_bytes()}


def of_comet_ml(folder: Path) -> set[str]:
    (archive,) = (folder / "run/comet").glob("*.zip")
    with zipfile.ZipFile(archive) as files:
        messages = files.read("messages.json").decode()
    assert "samples_000002.csv" in messages
    return {name for name in ("train/length", "eval/sampled/acc") if name in messages}


FOUND: dict[str, Callable[[Path], set[str]]] = {
    "mlflow": of_mlflow,
    "trackio": of_trackio,
    "swanlab": of_swanlab,
    "comet_ml": of_comet_ml,
}


NAMES = json.loads((Path(rlprims.__file__).parent / "runs" / "metric_names.json").read_text())


@pytest.mark.parametrize("library", NAMES)
def test_loggers_get_the_names_of_another_library(
    library: str, load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    ours = ("steps=1", "log_to=tests.trainer.loggers.Tables", "log_samples=1")
    config = load(settings, *ours, f"metric_names={library}")
    start(config, console)
    lines = lines_of(config)
    [logged] = [line["metrics"] for line in lines if "train/score" in line.get("metrics", {})]
    [kept] = [line for line in metrics_of(config.run_dir) if line["kind"] == "train"]
    theirs = {name: ours.removeprefix("train/") for ours, name in NAMES[library].items() if ours[6:] in kept}
    assert len(theirs) > 4
    assert {name: logged[name] for name in theirs} == {name: kept[ours] for name, ours in theirs.items()}
    assert any("table" in line for line in lines)


def test_the_page_has_the_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().split("## Names of verl and TRL")[1]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines() if "`train/" in line]
    found = {name: {row[0]: row[1 + i] for row in rows if row[1 + i]} for i, name in enumerate(("verl", "trl"))}
    assert found == NAMES
