"""The example of docs/agents.md: its base model, its environment and its config, from the root as the page says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example_plays_trains_and_is_drawn(tmp_path: Path) -> None:
    places = ["--out", str(tmp_path / "base"), "--data", str(tmp_path / "data")]
    script = ROOT / "examples" / "agent" / "warm_up.py"
    subprocess.run([sys.executable, str(script), *places, "--updates", "30"], cwd=tmp_path, check=True)
    config = ["train", "examples/agent/grpo.yaml", f"run_dir={tmp_path / 'run'}", f"model.path={tmp_path / 'base'}"]
    data = [f"data.{split}={tmp_path / 'data' / split}.jsonl" for split in ("train", "eval")]
    small = ["steps=2", "evaluation.limit=10", "evaluation.samples=1"]
    subprocess.run([sys.executable, "-m", "rlprims", *config, *data, *small], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["eval", "train", "train", "eval"]
    assert all(line["groups_failed"] == 0 and line["turns"] >= 1 for line in lines if line["kind"] == "train")
    assert (tmp_path / "run" / "curves.png").exists()
