"""A run on rows with images: stopped and resumed, exported, and refused where nothing reads them."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForImageTextToText

from rlprims import algorithms
from rlprims.cli import main
from rlprims.execution import ModelConfig, RayConfig
from rlprims.vision.processor import load_processor
from tests.execution import vision_zoo
from tests.trainer.runs import metrics_of, rlprims, small_run

TEMPLATE = (
    "{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<begin><image><end>"
    "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}="
)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("job")
    vision_zoo.save("qwen2_5_vl", folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows = []
    for i in range(12):
        image = base64.b64encode(vision_zoo.picture(i, 16, 8 + i)).decode()
        parts = [{"type": "image"}] * (i % 3) + [{"type": "text", "text": "ab"}]
        images = [f"data:image/png;base64,{image}"] * (i % 3)
        rows.append({"question": [{"role": "user", "content": parts}], "answer": str(i), "images": images})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = small_run(folder / "model", folder / "rows.jsonl", folder / "run")
    settings["model"] = {"path": str(folder / "model"), "device": "cpu", "vision": "trained", "vision_lr": 1e-4}
    return settings


def write(job: dict[str, Any], path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump(job | changes))
    return path


def trained(run: Path) -> list[dict[str, Any]]:
    """The lines of the steps; a run that ends early evaluates once more, which counts tokens."""
    lines = [line for line in metrics_of(run) if line["kind"] == "train"]
    return [{name: x for name, x in line.items() if name != "generated_tokens_total"} for line in lines]


@pytest.mark.slow
def test_a_resumed_run_is_the_whole_one_and_its_model_is_read_elsewhere(job: dict[str, Any], tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    rlprims("train", write(job, tmp_path / "job.yaml", run_dir=str(whole)))
    rlprims("train", write(job, tmp_path / "job.yaml", run_dir=str(part), steps=2))
    rlprims("resume", part, "steps=6")
    steps, again = (trained(run) for run in (whole, part))
    assert len(steps) == 6
    assert again == steps
    assert max(line["mismatch_max"] for line in steps) < 1e-4
    rlprims("export", whole, tmp_path / "exported")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported")
    before = AutoModelForImageTextToText.from_pretrained(job["model"]["path"])
    with torch.no_grad():
        moved = [(x - y).abs().max() for x, y in zip(model.parameters(), before.parameters(), strict=True)]
    assert max(moved) > 1e-3
    assert load_processor(str(tmp_path / "exported")).image_token == "<image>"


def test_images_are_refused_where_nothing_reads_them(
    job: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"path": job["model"]["path"], "device": "cpu", "vision": "none"}
    path = write(job, tmp_path / "job.yaml", run_dir=str(tmp_path / "run"), model=model)
    assert main(["train", str(path)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ")
    assert "model.vision: none reads texts, and rows or episodes have images" in lines[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.ray
def test_a_cluster_has_the_language_model_or_refuses(job: dict[str, Any]) -> None:
    from rlprims.execution.ray._checks import check

    run: Any = {"algorithm": algorithms.reinforce(), "temperature": 1.0, "updates": 1}
    for vision in ("trained", "frozen"):
        model = ModelConfig(path=job["model"]["path"], device="cpu", vision=vision)
        with pytest.raises(ValueError, match="a qwen2_5_vl is refused: it is multimodal"):
            check(RayConfig(), model, run)
