"""FSDP2 ranks in processes of their own, without Ray: see ``fsdp_ranks.py``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from rlprims import algorithms
from rlprims.algorithms import Algorithm
from rlprims.execution import ModelConfig, RayConfig
from tests import tiny

pytestmark = pytest.mark.ray
GRPO = algorithms.grpo()
ROOT = Path(__file__).parents[2]


def on_ranks(script: str, folder: Path, *chosen: str, count: int = 2) -> str:
    """What a script printed."""
    from rlprims.execution.ray._cluster import CPU_ENVIRONMENT  # which needs Ray

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += [str(Path(__file__).with_name(script)), str(folder), *chosen]
    # As pytest finds modules, for a process that is not pytest; one thread each.
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))}
    environment = os.environ | paths | CPU_ENVIRONMENT
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_two_ranks_are_one_process(tmp_path):
    for name, changes in {"plain": {}, "tied": {"tie_word_embeddings": True}, "wide": {"vocab_size": 4096}}.items():
        tiny.save_model(tmp_path / name, **changes)
    assert "passed: all" in on_ranks("fsdp_ranks.py", tmp_path)


def test_two_copies_of_the_weights_on_four_ranks_are_one_process(tmp_path):
    tiny.save_model(tmp_path / "plain")
    assert "passed: hybrid" in on_ranks("fsdp_ranks.py", tmp_path, "hybrid sharding", count=4)


ODD = {"num_key_value_heads": 2, "intermediate_size": 130, "vocab_size": 34}
"""Two ranks divide these evenly, and four do not."""


def save_odd_models(folder: Path) -> None:
    tiny.save_model(folder / "plain", **ODD)
    tiny.save_model(folder / "tied", **{**ODD, "vocab_size": 33}, tie_word_embeddings=True)


def test_two_ranks_that_divide_the_layers_are_one_process(tmp_path):
    save_odd_models(tmp_path)
    assert "passed: all" in on_ranks("tensor_ranks.py", tmp_path)


@pytest.mark.release
def test_two_times_two_ranks_that_divide_the_layers_are_one_process(tmp_path):
    save_odd_models(tmp_path)
    cases = ("parts", "steps", "settings", "checkpoints")
    assert "passed: checkpoints" in on_ranks("tensor_ranks.py", tmp_path, *cases, count=4)


def refused(folder: Path, algorithm: Algorithm = GRPO, size: int = 2, **model: object) -> str:
    from rlprims.execution.ray._tensor_parallel import check_plans  # which needs Ray

    config = RayConfig(training_workers=size, training_tensor_parallel=size)
    with pytest.raises(ValueError, match=f"ray.training_tensor_parallel={size}: expected .*, got .*; use ") as told:
        check_plans(config, ModelConfig(path=str(folder), **model), algorithm)
    return str(told.value)


def test_tensor_parallel_refuses_sizes_that_it_cannot_divide(tmp_path):
    tiny.config().save_pretrained(tmp_path / "one_head")
    tiny.config(**ODD, num_attention_heads=4).save_pretrained(tmp_path / "odd")
    assert "'num_key_value_heads': 1" in refused(tmp_path / "one_head")
    assert "model.lora" in refused(tmp_path / "odd", lora={})
    tiny.config(**{**ODD, "intermediate_size": 129}).save_pretrained(tmp_path / "layers")
    assert "model.layers.0.mlp.gate_proj of 129x64" in refused(tmp_path / "layers")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path / "gpt2")
    assert "got a gpt2" in refused(tmp_path / "gpt2")
    AutoConfig.for_model("qwen3_moe", **small).save_pretrained(tmp_path / "moe")
    assert "got a qwen3_moe" in refused(tmp_path / "moe")
    AutoConfig.for_model("cohere", **small, use_qk_norm=True).save_pretrained(tmp_path / "norms")
    assert "model.layers.0.self_attn.q_norm" in refused(tmp_path / "norms")
    assert "got a gpt2" in refused(tmp_path / "odd", algorithms.grpo(kl_coef=0.1), reference=str(tmp_path / "gpt2"))
    assert "got a gpt2" in refused(tmp_path / "odd", algorithms.ppo(), critic=str(tmp_path / "gpt2"))
    assert "num_key_value_heads" in refused(tmp_path / "odd", size=4)
