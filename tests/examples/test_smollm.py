"""A few steps of `make demo-llm`: a real pretrained model, its chat template, adapters, and a task of one number."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlprims.plan.memory import plan
from rlprims.plan.sizes import lengths_of
from rlprims.trainer.config import load_config

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_three_steps_on_a_real_model(smollm: Path, tmp_path: Path) -> None:
    scripts = ROOT / "examples" / "smollm"
    command = [sys.executable, str(scripts / "arithmetic.py"), "--out", str(tmp_path / "data")]
    subprocess.run(command, check=True, capture_output=True)
    places = [f"run_dir={tmp_path / 'run'}", f"model.path={smollm}"]
    places += [f"data.{split}={tmp_path / 'data' / split}.jsonl" for split in ("train", "eval")]
    small = ["steps=3", "prompts_per_step=2", "algorithm.group_size=8", "threads=1", "evaluation.limit=4"]
    small += ["evaluation.every=3", "evaluation.before_training=false", "evaluation.samples=1"]
    subprocess.run(
        [sys.executable, "-m", "rlprims", "train", str(scripts / "grpo.yaml"), *places, *small], cwd=ROOT, check=True
    )
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["skipped_updates"] for line in steps] == [0, 0, 0]
    # A real model at temperature 1: not sure of itself, and not at random (the logarithm of the vocabulary is 10.8).
    assert all(0.5 < line["entropy"] < 5.0 for line in steps)
    # The first step compares the trainer's log-probs with those of the sampler, which had a cache and padded prompts.
    assert steps[0]["mismatch_max"] < 1e-3
    # What `rlprims plan` says of the same config before it runs.
    config = load_config(run / "config.yaml")
    assert plan(config, lengths_of(config)).peak / 2**30 == pytest.approx(steps[-1]["memory/local"], rel=0.25)
    rollouts = [json.loads(line) for line in (run / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert all(line["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n") for line in rollouts)
    adapter = load_file(run / "checkpoints" / "step_000003" / "policy_adapter" / "adapter_model.safetensors")
    learned = [name for name, x in adapter.items() if "lora_B" in name and torch.any(x != 0)]
    assert len(learned) == 30 * 7  # every linear layer of every block
