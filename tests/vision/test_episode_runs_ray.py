"""Episodes with images on a cluster: the runs of one process, with images of the first and of later turns."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlprims.cli import main
from rlprims.runs.records import recorded_steps
from tests import tiny
from tests.trainer.runs import metrics_of, rlprims
from tests.trainer.test_pairs import Ran, assert_equal
from tests.vision.test_episode_runs import check_records, config
from tests.vision.test_run import model, rows

__all__ = ["model", "rows"]
WHOLE = {"steps": 2, "optimizer": {"lr": 1e-3, "eps": 1e-4}, "evaluation": {"every": 1, "samples": 2}}
STREAM = WHOLE | {"stream": True, "prompts_per_generation": None}
HF = {"engine": "hf", "training_workers": 2}
VLLM = {"kv_cache_bytes": 64 << 20, "start_timeout": 480.0, "engine_options": {"block_size": 32}}
"""The blocks are shorter than prompts, so that vLLM finds the images of earlier turns in its cache."""


def ran(file: Path, model: Path) -> Ran:
    """A run in which later turns show images."""
    rlprims("train", file)
    run = file.with_suffix("")
    assert check_records(run, model) > 0
    lines = [json.loads(line) for step in recorded_steps(run).values() for line in step.read_text().splitlines()]
    return Ran(metrics_of(run), lines)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("cluster", "settings"),
    [
        pytest.param(HF, STREAM, id="hf-stream"),
        pytest.param(VLLM, WHOLE, id="vllm"),
        pytest.param(HF, WHOLE, id="hf", marks=pytest.mark.release),
        pytest.param(VLLM, STREAM, id="vllm-stream", marks=pytest.mark.release),
    ],
)
def test_episodes_on_ray_are_the_local_ones(
    cluster: dict[str, Any], settings: dict[str, Any], model: Path, rows: Path, tmp_path: Path
) -> None:
    """The same tokens, scores and images in every step, and the same losses and norms."""
    one = ran(config(model, rows, tmp_path / "local", "Pictures", **settings), model)
    many = ran(config(model, rows, tmp_path / "ray", "Pictures", **settings, execution="ray", ray=cluster), model)
    assert_equal(many, one)
    assert [line.get("images") for line in many.rows] == [line.get("images") for line in one.rows]
    assert sum(line.get("grad_norm", 0) > 1e-3 for line in one.metrics) == 2


@pytest.mark.ray
def test_rows_of_text_whose_environment_has_images_are_refused_alike(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"question": "Where?", "answer": "1"}])
    file = config(model, text, tmp_path / "run", "Pictures", execution="ray", ray=HF | {"cpu_offload": True})
    assert main(["train", str(file)]) != 0
    said = capsys.readouterr().err.strip().splitlines()
    assert said == ["error: ray.cpu_offload: not yet with images: leave it out"]
    assert not (tmp_path / "run").exists()
