"""`rlprims plan` of a model that reads images: what its images take is what a run takes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

from rlprims.plan.memory import plan
from rlprims.plan.sizes import lengths_of, shape_of
from rlprims.trainer.config import load_config
from tests import tiny
from tests.trainer.runs import small_run
from tests.vision.made import ROOT, build_processor, encoded, picture

SIDE, PATCH, LAYERS, HIDDEN, INNER = 256, 8, 4, 64, 256
PATCHES = (SIDE // PATCH) ** 2


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """64 rows of an update read 65,536 patches, which the language model has as 4,096 tokens."""
    folder, processor = tmp_path_factory.mktemp("job"), build_processor(256)
    processor.image_processor.size = processor.image_processor.max_image_size = {"longest_edge": SIDE}
    processor.image_seq_len = PATCHES // 16
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 2}
    vision = {**sizes, "image_size": SIDE, "patch_size": PATCH, "num_hidden_layers": LAYERS}
    text = {**sizes, "model_type": "llama", "num_hidden_layers": 2, "vocab_size": len(processor.tokenizer)}
    ids = {"image_token_id": processor.image_token_id, "pad_token_id": processor.tokenizer.pad_token_id}
    text |= {
        "pad_token_id": ids["pad_token_id"],
        "eos_token_id": processor.tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    config = Idefics3Config(vision_config=vision, text_config=text, scale_factor=4, **ids)
    for part in (Idefics3ForConditionalGeneration(config), processor):
        part.save_pretrained(folder / "model")
    rows = []
    for i in range(32):
        (folder / f"{i}.png").write_bytes(encoded(picture((i, 99, 0), SIDE, SIDE)))
        rows.append({"question": "How many dots?", "answer": "1", "images": [f"{i}.png"]})
    settings = small_run(folder / "model", tiny.write_jsonl(folder / "rows.jsonl", rows), folder / "run")
    settings["data"] |= {"template": "chat", "eval": None}
    settings["model"] = {"path": str(folder / "model"), "device": "cpu"}
    grpo = {"preset": "grpo", "group_size": 8, "kl_coef": 0.0}
    return settings | {"steps": 1, "prompts_per_step": 8, "prompts_per_generation": None, "algorithm": grpo}


@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", pytest.param("trained", marks=pytest.mark.release)])
def test_a_run_is_as_large_as_its_plan(job: dict[str, Any], vision: str, tmp_path: Path) -> None:
    settings = job | {"run_dir": str(tmp_path / "run"), "model": job["model"] | {"vision": vision}}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(settings))
    subprocess.run([sys.executable, "-m", "rlprims", "train", str(path)], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    config = load_config(path)
    planned = plan(config, lengths_of(config)).peak / 2**30
    measured = max(line.get("memory/local", 0.0) for line in lines)
    assert planned == pytest.approx(measured, rel=0.25)


SMOLVLM = {
    "text_config": {
        **{"model_type": "llama", "vocab_size": 49280, "hidden_size": 576, "intermediate_size": 1536, "head_dim": 64},
        **{
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
        },
    },
    "vision_config": {
        **{"hidden_size": 768, "intermediate_size": 3072, "image_size": 512, "patch_size": 16},
        **{"num_attention_heads": 12, "num_hidden_layers": 12},
    },
}
"""The sizes in the published config.json of HuggingFaceTB/SmolVLM-256M-Instruct."""


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_the_config_of_a_real_model_fits_one_card(vision: str, tmp_path: Path) -> None:
    Idefics3Config(**SMOLVLM, scale_factor=4, tie_word_embeddings=False, pad_token_id=2).save_pretrained(tmp_path)
    changes = (f"model.path={tmp_path}", "model.device=cuda", f"model.vision={vision}")
    config, tiles = load_config(ROOT / "examples" / "smolvlm" / "grpo.yaml", changes), 17  # of an image of 2048 x 2048
    shape = shape_of(config.model)
    assert shape.parameters == 256_484_928  # 256 M, as published
    tower, projection = 12 * 7_087_872 + 590_592 + 1024 * 768 + 1536, 16 * 768 * 576
    assert shape.seeing == tower + projection
    assert shape.patch == 3 * 16**2
    assert shape.widths == (12 * (10 * 768 + 2 * 3072), 768 + 3072)
    found = plan(config, lengths_of(config, 1300, tiles * 3 * 512**2))
    lines = {line.what: line.bytes for line in [*found.rank, *found.update]}
    assert lines.get("frozen weights", 0) == (2 * shape.seeing if vision == "frozen" else 0)
    assert lines["optimizer"] == 8 * (shape.parameters - shape.seeing * (vision == "frozen"))
    patches = 8192 / (1300 + 256) * tiles * 1024
    kept = 2 * shape.widths[0] * (vision == "trained")
    assert lines["reading images"] == pytest.approx(patches * (2 * 4 * 768 + kept + 2 * 2 * 3840))
    assert 4 * 2**30 < found.peak < 80e9


def test_ranks_hold_a_frozen_part_whole_if_it_computes_in_its_own_dtype(tmp_path: Path) -> None:
    Idefics3Config(**SMOLVLM, scale_factor=4, tie_word_embeddings=False, pad_token_id=2).save_pretrained(tmp_path)
    common = (f"model.path={tmp_path}", "model.device=cuda", "model.dtype=float32", "execution=ray")
    held, gathered = [], []
    for changes in ((), ("ray.mixed_precision=bfloat16",)):
        ray = ("ray.training_workers=2", "ray.gpus_per_worker=1", *changes)
        config = load_config(ROOT / "examples" / "smolvlm" / "grpo.yaml", (*common, *ray))
        found = plan(config, lengths_of(config, 1300, 512**2))
        lines = {line.what: line.bytes for line in [*found.rank, *found.update]}
        held.append(lines["frozen weights"])
        gathered.append(lines["gathered weights"])
    seeing = shape_of(config.model).seeing
    assert held == [4 * seeing, 4 * seeing / 2]
    assert gathered[1] == gathered[0] / 2 + 2 * seeing
