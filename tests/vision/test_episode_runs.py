"""Runs whose environments have images: from the rows to the records, with their replay and their resume."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprims.cli import main
from rlprims.runs.records import by_group, read_rollouts, recorded_steps
from rlprims.vision.processor import load_processor
from tests import tiny
from tests.reports.test_rollout_page import embedded
from tests.trainer.runs import metrics_of, rlprims, small_run
from tests.vision import environments
from tests.vision.made import PATCHES, encoded, picture
from tests.vision.test_run import model, rows

__all__ = ["model", "rows"]


def config(model: Path, rows: Path, run: Path, name: str, **changes: Any) -> Path:
    settings = small_run(model, rows, run) | {"steps": 4, "verifier": None, **changes}
    settings["data"] |= {"template": "chat", "environment": f"tests.vision.environments.{name}"}
    settings["algorithm"] = {"preset": "dapo", "group_size": 3, "score_shaping": [], "filter": {"metric": "scores"}}
    settings["algorithm"]["filter"]["max_generation_batches"] = 50
    settings["sampling"] = {"max_new_tokens": 3}
    settings["episode_limits"] = {"turns": 3}
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(settings))
    return path


def check_records(run: Path, model: Path) -> int:
    """Each row has as many images as placeholders; returns how many images are of later turns."""
    token, later = load_processor(str(model)).image_token_id, 0
    for step in recorded_steps(run):
        for group in by_group(read_rollouts(run, step)):
            images = list[str]()
            for row in group:
                images = images if row.images is None else row.images
                assert (row.prompt_ids + row.response_ids).count(token) == PATCHES * len(images)
                assert not any(i == token and not read for i, read in zip(row.response_ids, row.observed, strict=True))
                later += row.response_ids.count(token) // PATCHES
    return later


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Texts", "Pictures", "Own"])
def test_a_run_its_replay_and_its_resume(name: str, model: Path, rows: Path, tmp_path: Path) -> None:
    whole, replayed, resumed = tmp_path / "whole", tmp_path / "replayed", tmp_path / "resumed"
    rlprims("train", config(model, rows, whole, name))
    steps = [line for line in metrics_of(whole) if line["kind"] == "train"]
    assert len(steps) == 4
    assert max(line["mismatch_max"] for line in steps) < 1e-4
    assert max(line["turns"] for line in steps) > 1
    assert (check_records(whole, model) > 0) == (name != "Texts")
    rlprims("train", config(model, rows, replayed, name), f"replay={whole}")
    assert metrics_of(replayed) == metrics_of(whole)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000004")
    (resumed / "summary.json").unlink()
    rlprims("resume", resumed)
    assert metrics_of(resumed) == metrics_of(whole)
    check_records(resumed, model)


@pytest.mark.slow
def test_streams_pages_and_a_replay_of_other_images(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    stream = {"stream": True, "prompts_per_generation": None}
    rlprims("train", config(model, rows, run, "Pictures", **stream))
    assert check_records(run, model) > 0
    page = tmp_path / "page.html"
    rlprims("rollouts", run, "--html", page)
    groups = [group for step in embedded(page)["steps"] for group in step["groups"]]
    shown = {image for group in groups for each in (group, *group["rows"]) for image in each.get("images", ())}
    lines = [json.loads(x) for file in (run / "rollouts").glob("*") for x in file.read_text().splitlines()]
    assert shown == {image for line in lines for image in line.get("images", ())}
    assert {base64.b64encode(encoded(picture(colour))).decode() for colour in environments.COLOURS} & shown
    monkeypatch.setattr(environments.Pictures, "colours", ("black",) * 4)
    assert main(["train", str(config(model, rows, tmp_path / "other", "Pictures", **stream)), f"replay={run}"]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "answers another image: an environment must answer as before" in said


@pytest.mark.slow
def test_damaged_images_are_counted_and_the_run_goes_on(model: Path, rows: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.warns(UserWarning, match="image in the row: .*Such episodes have no score"):
        rlprims("train", config(model, rows, run, "Sick", unscored="leave_out", steps=2))
    assert any(line.get("causes/messages that cannot be rendered", 0) for line in metrics_of(run))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.template": "'{question}'"}, "has images, expected data.template: chat"),
        ({"model.vision": "none"}, "model.vision: none reads texts, and rows or episodes have images"),
        ({"model.path": "text"}, "expected a model with a processor of images"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(
    changes: dict[str, str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"question": "Where?", "answer": "1"}])
    if "model.path" in changes:
        changes = {"model.path": str(tiny.save_model(tmp_path / "model"))}
    settings = [f"{name}={value}" for name, value in changes.items()]
    assert main(["train", str(config(model, text, tmp_path / "run", "Pictures")), *settings]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
