"""Fills the tables of docs/scale.md: ``python -m tools.scale_page``, from the root.

What is between ``<!-- table: NAME -->`` and ``<!-- end -->`` is made by :func:`rlprims.plan.memory.plan` from the
settings on the page.
"""

import json
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from transformers import Qwen3Config

from rlprims.execution import ModelConfig
from rlprims.plan.memory import Line, plan, total
from rlprims.plan.sizes import Prompts, Shape, shape_of
from rlprims.trainer.config import Config

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
QWEN3: dict[str, dict[str, Any]] = {
    "8B": {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    "32B": {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64},
}
PROMPT = 150
"""Tokens of a prompt."""
BLOCK = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def config_with(settings: dict[str, Any], folder: Path) -> None:
    heads = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
    Qwen3Config(**heads | settings).save_pretrained(folder)


def shape_with(settings: dict[str, Any]) -> Shape:
    with tempfile.TemporaryDirectory() as folder:
        config_with(settings, Path(folder))
        return shape_of(ModelConfig(path=folder))


def jobs() -> dict[str, dict[str, Any]]:
    """The settings on the page, by the size of the model."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    found = [yaml.safe_load(block) for block in blocks]
    return {name: next(job for job in found if job["model"]["path"].endswith(name)) for name in QWEN3}


@cache
def worked(name: str, *changes: str) -> tuple[list[Line], list[Line], list[Line]]:
    """Memory of a rank, in an update, and of an engine."""
    job = json.loads(json.dumps(jobs()[name]))
    for change in changes:
        *parents, last = change.partition("=")[0].split(".")
        section = job
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = yaml.safe_load(change.partition("=")[2])
    with tempfile.TemporaryDirectory() as folder:
        config_with(QWEN3[name], Path(folder))
        job["model"]["path"] = folder
        config = Config.model_validate(job | {"model": job["model"] | {"device": "cuda"}})
        memory = plan(config, Prompts(PROMPT, PROMPT))
        return memory.rank, memory.update, memory.engine


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def memory_table(name: str) -> list[str]:
    rank, update, engine = worked(name)
    lines = [row("", "GiB", "how", "what lowers it"), "|---|---:|---|---|"]
    for title, part in (("a rank", rank + update), ("an engine, on each device", engine)):
        lines += [row(line.what, f"{line.bytes / 2**30:.1f}", line.how, settings(line.lower)) for line in part]
        lines.append(row(f"**{title}**", f"**{total(part) / 2**30:.1f}**", "", ""))
    return lines


def change_table(name: str) -> list[str]:
    lines = [row("change", "a rank, GiB", "an engine, GiB"), "|---|---:|---:|"]
    changes: dict[str, tuple[tuple[str, ...], ...]] = {
        "8B": (
            (),
            ("ray.reduce_gradients=once",),
            ("model.max_tokens_per_micro_batch=8192",),
            ("ray.training_workers=8", "ray.rollout_workers=8", "ray.colocate=true"),
            ("model.lora.rank=32", "model.lora.sync=adapter", "model.dtype=bfloat16", "ray.mixed_precision=null"),
        ),
        "32B": (
            (),
            ("ray.reduce_gradients=once",),
            ("model.max_tokens_per_micro_batch=8192",),
            ("model.lora.rank=32", "model.lora.sync=adapter", "model.dtype=bfloat16", "ray.mixed_precision=null"),
        ),
    }
    for change in changes[name]:
        rank, update, engine = worked(name, *change)
        what = ", ".join(f"`{each.replace('=', ': ')}`" for each in change) or "none"
        sizes = (f"{total(part) / 2**30:.0f}" for part in (rank + update, engine))
        lines.append(row(what, *sizes))
    return lines


def settings(names: str) -> str:
    return f"`{names}`" if names else ""


def tables() -> dict[str, list[str]]:
    found = {}
    for name in QWEN3:
        found |= {f"memory {name}": memory_table(name), f"changes {name}": change_table(name)}
    return found


def page() -> str:
    made = tables()
    return BLOCK.sub(lambda m: m[1] + "\n".join(made[m[2]]) + "\n" + m[3], PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
