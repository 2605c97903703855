"""A run on images from its file to its records: every response is scored with the images of its own prompt."""

import base64
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import ImageDraw

from rlprims.cli import main
from rlprims.runs.records import by_group, read_rollouts, recorded_steps
from tests import tiny
from tests.trainer.runs import metrics_of, rlprims, small_run
from tests.trainer.test_pairs import Ran, assert_equal
from tests.vision.made import build_processor, encoded, picture

from warm_up import build_model  # isort: skip - of examples/dots, whose folder tests.vision.made adds


def own_images(response: str, answer: str, images: tuple[bytes, ...]) -> float:
    """The answer of a row is the hash of its images. The score differs between responses."""
    assert answer == digest(images), "the images of another row"
    return len(response) % 3 / 2


def digest(images: Any) -> str:
    return hashlib.sha256(b"".join(images)).hexdigest()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, processor = tmp_path_factory.mktemp("model"), build_processor(64)
    torch.manual_seed(0)
    build_model(processor).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with one image, with two, and without."""
    folder, made = tmp_path_factory.mktemp("rows"), []
    for i in range(12):
        data = []
        for j in range((1, 2, 0)[i % 3]):
            image = picture("white")
            ImageDraw.Draw(image).rectangle((i, 0, i + 4, 5 + 10 * j), fill="red")
            data.append(encoded(image))
            (folder / f"{i}-{j}.png").write_bytes(data[-1])
        names = [f"{i}-{j}.png" for j in range(len(data))]
        made.append({"question": "How many dots?", "answer": digest(data), "images": names})
    return tiny.write_jsonl(folder / "rows.jsonl", made)


def config(model: Path, rows: Path, run: Path, **changes: Any) -> Path:
    settings = small_run(model, rows, run) | {"verifier": f"{__name__}.own_images", "steps": 4, **changes}
    settings["data"] |= {"template": "chat"}
    settings["algorithm"] |= {"group_size": 2, "corrections": ["rlprims.corrections.tis"]}
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(settings))
    return path


def check_records(run: Path) -> None:
    """Every group has the images that its answer names."""
    for step in recorded_steps(run):
        for group in by_group(read_rollouts(run, step)):
            assert digest(map(base64.b64decode, group[0].images)) == group[0].answer
            assert not any(row.images for row in group[1:])


@pytest.mark.slow
def test_a_run_and_its_replay(model: Path, rows: Path, tmp_path: Path) -> None:
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    rlprims("train", config(model, rows, recorded))
    check_records(recorded)
    rlprims("train", config(model, rows, replayed), f"replay={recorded}")
    assert metrics_of(replayed) == metrics_of(recorded)
    check_records(replayed)
    page = tmp_path / "page.html"
    rlprims("rollouts", recorded, "--html", page)
    lines = map(json.loads, (recorded / "rollouts" / "step_000001.jsonl").read_text().splitlines())
    one = next(line for line in lines if line.get("images"))
    assert one["images"][0] in page.read_text()


@pytest.mark.slow
def test_a_resumed_run_with_old_groups_has_the_same_numbers(model: Path, rows: Path, tmp_path: Path) -> None:
    """Surplus groups and old ones are in the checkpoint, with their images."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    old = {"share": 0.25, "max_age": 3, "capacity": 4}
    rlprims("train", config(model, rows, whole, old_groups=old))
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000004")
    (resumed / "summary.json").unlink()
    rlprims("resume", resumed)
    assert metrics_of(resumed) == metrics_of(whole)
    assert any(line.get("old_groups", 0) for line in metrics_of(whole))
    check_records(resumed)


def test_bad_images_end_a_run_before_it_begins(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"question": "Where?", "answer": "1", "images": ["none.png"]}])
    assert main(["train", str(config(model, bad, tmp_path / "run"))]) != 0
    assert f"{bad}:1: image none.png: no such file in {tmp_path}" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.ray
def test_a_run_on_ray_with_vllm_is_the_local_one(model: Path, rows: Path, tmp_path: Path) -> None:
    """The same tokens and scores in every step, and the same losses and norms."""
    changes = {"evaluation": {"every": 2, "samples": 2}, "optimizer": {"lr": 1e-3, "eps": 1e-4}}
    ray = {"kv_cache_bytes": 64 << 20, "start_timeout": 480.0}
    ran = []
    for name, where in (("local", {}), ("ray", {"execution": "ray", "ray": ray})):
        rlprims("train", config(model, rows, tmp_path / name, **changes, **where))
        steps = recorded_steps(tmp_path / name).values()
        lines = [json.loads(line) for step in steps for line in step.read_text().splitlines()]
        ran.append(Ran(metrics_of(tmp_path / name), lines))
    assert_equal(*ran)
    assert sum(line.get("grad_norm", 0) > 1e-3 for line in ran[0].metrics) == 4
