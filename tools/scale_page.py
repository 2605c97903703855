"""Fills the tables of docs/scale.md: ``python -m tools.scale_page``, from the root.

What is between ``<!-- table: NAME -->`` and ``<!-- end -->`` is made by the functions of ``rlprims.plan`` from
the settings on the page. ``--measure FILE`` first stores what was measured, with FILE the output of
``tests/execution/scale_ranks.py``, in docs/benchmarks/scale.json.
"""

import argparse
import json
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from transformers import Qwen3Config

from rlprims.execution import ModelConfig
from rlprims.plan import scale
from rlprims.plan.memory import Line, plan, total
from rlprims.plan.sizes import Prompts, Shape, shape_of, text_of
from rlprims.trainer.config import Config

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
MEASURED = ROOT / "docs" / "benchmarks" / "scale.json"
QWEN3: dict[str, dict[str, Any]] = {
    "8B": {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    "32B": {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64},
}
PROMPT, RESPONSE = 150, 3056
"""Tokens of the mean row, 3206 in all, as in the runs of NeMo-RL that the page compares with."""
RATES = scale.Rates(flops=400e12, memory=2.7e12, network=360e9, disk=2e9)
"""An H100 and NVLink: 40 % of 989 TFLOP/s, 80 % of 3.35 TB/s, 80 % of 450 GB/s; and a file system."""
BETWEEN_NODES = RATES._replace(network=40e9)
"""80 % of 400 Gb/s for each GPU."""
CASES = {"8B": RATES, "32B": BETWEEN_NODES}
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
def worked(name: str, *changes: str) -> tuple[list[list[Line]], list[scale.Phase], float, scale.Phase]:
    """Memory of a rank, in an update, and of an engine; the phases, the step, and a checkpoint."""
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
        prompts = Prompts(PROMPT, PROMPT)
        memory, phases = plan(config, prompts), scale.phases(config, prompts, CASES[name], RESPONSE)
        step = scale.step_seconds(config, phases)
        return [memory.rank, memory.update, memory.engine], phases, step, scale.checkpoint(config, CASES[name])


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def memory_table(name: str) -> list[str]:
    (rank, update, engine), *_ = worked(name)
    lines = [row("", "GiB", "how", "what lowers it"), "|---|---:|---|---|"]
    for title, part in (("a rank", rank + update), ("an engine, on each device", engine)):
        lines += [row(line.what, f"{line.bytes / 2**30:.1f}", line.how, settings(line.lower)) for line in part]
        lines.append(row(f"**{title}**", f"**{total(part) / 2**30:.1f}**", "", ""))
    return lines


def phase_table(name: str) -> list[str]:
    _, phases, step, saved = worked(name)
    lines = [row("phase", "operations", "read", "moved", "s", "how", "what changes it")]
    lines.append("|---|---:|---:|---:|---:|---|---|")
    for phase in phases:
        *numbers, lower = scale.cells(phase)
        lines.append(row(*numbers, settings(lower)))
    lines.append(row("**step**", "", "", "", f"**{step:.0f}**", "", ""))
    *numbers, lower = scale.cells(saved)
    lines.append(row(*numbers, settings(lower)))
    return lines


def change_table(name: str) -> list[str]:
    lines = [row("change", "a rank, GiB", "an engine, GiB", "step, s"), "|---|---:|---:|---:|"]
    changes: dict[str, tuple[tuple[str, ...], ...]] = {
        "8B": (
            (),
            ("max_staleness=1",),
            ("ray.weight_transfer=gloo",),
            ("ray.reduce_gradients=once",),
            ("model.max_tokens_per_micro_batch=8192",),
            ("ray.training_workers=8", "ray.rollout_workers=8", "ray.colocate=true"),
            ("model.lora.rank=32", "model.lora.sync=adapter", "model.dtype=bfloat16", "ray.mixed_precision=null"),
        ),
        "32B": (
            (),
            ("ray.reduce_gradients=once",),
            ("max_staleness=1",),
            ("ray.weight_transfer=gloo",),
            ("model.max_tokens_per_micro_batch=8192",),
            ("model.lora.rank=32", "model.lora.sync=adapter", "model.dtype=bfloat16", "ray.mixed_precision=null"),
        ),
    }
    for change in changes[name]:
        (rank, update, engine), _, step, _ = worked(name, *change)
        what = ", ".join(f"`{each.replace('=', ': ')}`" for each in change) or "none"
        sizes = (f"{total(part) / 2**30:.0f}" for part in (rank + update, engine))
        lines.append(row(what, *sizes, f"{step:.0f}"))
    return lines


def settings(names: str) -> str:
    return f"`{names}`" if names else ""


def model_table() -> list[str]:
    lines = [row("", "parameters", "of them in layers", "KV cache of a token, bfloat16", "weights, bfloat16")]
    lines.append("|---|---:|---:|---:|---:|")
    for name, values in QWEN3.items():
        shape = shape_with(values)
        numbers = (f"{x / 1e9:.2f} G" for x in (shape.parameters, shape.body))
        held = (text_of(scale.kv_bytes(shape, 2)), text_of(2 * shape.parameters))
        lines.append(row(f"Qwen3-{name}", *numbers, *held))
    return lines


def measured_table() -> list[str]:
    lines = [row("what", "formula", "by the formula", "measured", "ratio"), "|---|---|---:|---:|---:|"]
    for each in json.loads(MEASURED.read_text()):
        planned, measured = each["by_formula"], each["measured"]
        unit = each["unit"]
        numbers = (f"{planned:,.0f} {unit}", f"{measured:,.0f} {unit}", f"{planned / measured:.3f}")
        lines.append(row(each["what"], each["formula"], *numbers))
    return lines


QWEN3_4B = QWEN3["8B"] | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
PRIME_RL = [
    ("RL, rows of 16384", 16384, 26.03e3, 13.9, 17.1),
    ("RL, rows of 65536", 65536, 28.97e3, 35.4, 36.1),
    ("SFT, rows of 16384", 16384, 49.72e3, 26.6, 54.6),
]
"""Of its trainer, Qwen3-4B on 8 H100: tokens of a row, tokens per second, MFU in %, peak memory in GiB."""


def mfu(tokens: int, tokens_per_second: float) -> float:
    """Of an H100, as prime-rl counts it: its width of a head is hidden / heads."""
    shape = shape_with(QWEN3_4B)._replace(queries=2560)
    return scale.update_flops(shape, tokens, tokens, tokens**2) / tokens * tokens_per_second / (8 * 989e12)


def prime_table() -> list[str]:
    columns = ("Qwen3-4B", "tokens/s", "MFU", "MFU by our formulas", "TFLOP/s of a device", "peak memory, GiB")
    lines = [row(*columns), "|---|---:|---:|---:|---:|---:|"]
    for what, tokens, rate, published, memory in PRIME_RL:
        done = (
            scale.update_flops(shape_with(QWEN3_4B), tokens, tokens, tokens**2, recomputed=True) / tokens * rate / 8e12
        )
        ours = f"{100 * mfu(tokens, rate):.1f} %"
        lines.append(row(what, f"{rate:,.0f}", f"{published} %", ours, f"{done:.0f}", f"{memory}"))
    return lines


def verl_table() -> list[str]:
    """Ours of a sync: the bytes of theirs by our formula."""
    old, update = (
        next(p.seconds or 0 for p in worked("8B")[1] if p.what == what) for what in ("old log-probs", "update")
    )
    sync = [f"{scale.gathered_seconds(2 * parameters, BETWEEN_NODES):.1f} s" for parameters in (30.5e9, 27e9)]
    at = "https://github.com/volcengine/verl/blob/b178a3cd56f58b2d502255daba591e92833930a7"
    fully = f"[fully_async.md]({at}/docs/advance/fully_async.md)"
    first = "Qwen2.5-Math-7B, 512 x 16 rows, 32 H20: update / old log-probs"
    rows = [
        (fully, first, f"{269.80 / 107.71:.1f}", f"{update / old:.1f}"),
        (
            f"[checkpoint_engine]({at}/verl/checkpoint_engine/README.md)",
            "Qwen3-30B-A3B, 2 FSDP ranks to 30 receivers, H100, 400 Gb/s: sync by NCCL",
            "7 s",
            sync[0],
        ),
        (
            "[#7263](https://github.com/verl-project/verl/pull/7263)",
            "27B in bfloat16, 8 FSDP2 ranks to 8 GPUs of another node: sync by NCCL; all ranks send",
            "3.0; 2.5 s",
            sync[1],
        ),
        (f"[dpsk.md]({at}/docs/perf/dpsk.md)", "Qwen3-30B-A3B on 8, 16, 32 GPUs: MFU", "40, 37, 31 %", "40 %, assumed"),
    ]
    return [row("source", "what", "verl", "ours, on paper"), "|---|---|---:|---:|", *(row(*cells) for cells in rows)]


def nemo_table() -> list[str]:
    lines = [row("run", "GPUs", "rows x mean tokens", "step, s", "tokens/s for each GPU"), "|---|---:|---:|---:|---:|"]

    def ours(name: str, what: str, change: tuple[str, ...] = ()) -> str:
        rows, gpus = (1024, 8) if name == "8B" else (2048, 64)
        _, _, step, _ = worked(name, *change)
        rate = rows * (PROMPT + RESPONSE) / step / gpus
        return row(f"ours on paper, Qwen3-{name}, {what}", str(gpus), f"{rows} x 3206", f"{step:.0f}", f"{rate:.0f}")

    lines.append(row("Llama 3.1 8B, on policy", "16", "2048 x 1060", "97.7", "1562"))
    lines.append(row("Llama 3.1 8B, one step off", "16", "2048 x 1129", "74.6", "2161"))
    lines += [ours("8B", "in turn"), ours("8B", "one batch ahead", ("max_staleness=1",))]
    lines.append(row("Qwen3-32B, on policy", "32", "2048 x 3206", "393", "540"))
    lines.append(row("Qwen3-32B, one step off", "64", "2048 x 3207", "215", "494"))
    return [*lines, ours("32B", "in turn"), ours("32B", "one batch ahead", ("max_staleness=1",))]


def tables() -> dict[str, list[str]]:
    found = {"models": model_table(), "measured": measured_table(), "prime": prime_table()}
    found |= {"verl": verl_table(), "nemo": nemo_table()}
    for name in QWEN3:
        found |= {f"memory {name}": memory_table(name), f"phases {name}": phase_table(name)}
        found[f"changes {name}"] = change_table(name)
    return found


def page() -> str:
    made = tables()
    return BLOCK.sub(lambda m: m[1] + "\n".join(made[m[2]]) + "\n" + m[3], PAGE.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.scale_page", description="Fill the tables of docs/scale.md.")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="what scale_ranks.py printed")
    options = parser.parse_args()
    if options.measure:
        from tests.scale_measures import measures

        found = [measure._asdict() for measure in measures()]
        found += [json.loads(line) for line in options.measure.read_text().splitlines() if line[:1] == "{"]
        MEASURED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
