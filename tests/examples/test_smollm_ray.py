"""The job of `make demo-llm` on Ray: the engine of vLLM has the trainer's weights, a tied head and a real tokenizer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.ray
@pytest.mark.release
def test_the_sampler_has_the_trainers_log_probs_after_every_sync(smollm: Path, tmp_path: Path) -> None:
    scripts = ROOT / "examples" / "smollm"
    data = tmp_path / "data"
    subprocess.run([sys.executable, str(scripts / "arithmetic.py"), "--out", str(data)], check=True)
    places = [f"run_dir={tmp_path / 'run'}", f"model.path={smollm}"]
    places += [f"data.{split}={data / split}.jsonl" for split in ("train", "eval")]
    small = ["steps=3", "prompts_per_step=2", "threads=1", "evaluation.limit=2", "evaluation.samples=1"]
    small += ["evaluation.every=3", "evaluation.before_training=false"]
    command = [sys.executable, "-m", "rlprims", "train", str(scripts / "ray.yaml"), *places, *small]
    subprocess.run(command, cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == 3
    assert all(line["grad_norm"] > 0 for line in steps[:1]), "there is something to send"
    assert all(0 < line["mismatch_max"] < 1e-3 for line in steps)
