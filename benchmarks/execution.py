"""The engines of ``execution: ray``: ``python -m benchmarks.execution``, in ``.venv-ray``.

It needs the models of ``make demo`` and ``make demo-llm``. Tokens per second beside the bare engine, the memory of a
weight sync, and steps whose responses have very different lengths, all in one run.
"""

import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import _machine
from rlprims.trainer.config import load_config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build
from rlprims.trainer.sources.responses import prompt_rows

RESULTS = Path("docs/benchmarks/execution.json")
EXAMPLES = {
    "words, 0.1 M parameters": "examples/words/ray.yaml",
    "SmolLM2, 135 M parameters": "examples/smollm/ray.yaml",
}
REPEATS, STEPS, WARM_UP = 9, 20, 4
PROMPTS = 16
LENGTHS = (12, 96), (32, 256)
"""Tokens of the short and of the long responses: one prompt in sixteen has responses that are eight times as long."""
MODES = {
    "in turn": ("max_staleness=0",),
    "`max_staleness: 1`": ("max_staleness=1",),
    "`max_staleness: 2`, `stream: true`": ("max_staleness=2", "stream=true"),
    "`max_staleness: 4`, `stream: true`": ("max_staleness=4", "stream=true"),
}
PAGE = """\
# Engines of a cluster: sampling, weight syncs, schedules

Measured by `python -m benchmarks.execution` at {commit}; do not edit.

Ranks, engine and driver share {cores} CPU cores, without
a GPU.

## Sampling, and a weight sync

**Share** is the tokens per second of `Execution.generate` over those of vLLM's own `generate` for the same prompts and
lengths: the median of {repeats} pairs, and the range. For the first column vLLM computes the same seeds and log-probs,
for the second neither. **Start** is the time until all processes have their models and the engine its first weights.
**Peak** is the additional memory of a process during a sync, as a multiple of the largest layer
group. This group is the largest part that is sent at once.

| model | start | share | share without seeds, log-probs | sync | largest group | peak of rank 0 | peak of the engine |
|---|---:|---|---|---|---:|---:|---:|
{models}

## Responses of very different lengths

Each step has {prompts} prompts with 4 responses each. The responses to one prompt are eight times as long as the
others. The model has the size of the words example. The seconds are means of {steps} steps, after
{warm_up} steps that are not counted.

| tokens | schedule | s/step | of the time in turn | largest staleness |
|---|---|---:|---:|---:|
{ragged}
"""


def main() -> None:
    found = {
        "date": date.today().isoformat(),
        "machine": _machine.describe(),
        "models": {name: engines(path) for name, path in EXAMPLES.items()},
        "ragged": {f"{short} and {long}": ragged(short, long) for short, long in LENGTHS},
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    page = PAGE.format(
        commit=found["machine"]["commit"],
        cores=found["machine"]["cores"],
        repeats=REPEATS,
        models="\n".join(_model_row(name, row) for name, row in found["models"].items()),
        prompts=PROMPTS,
        steps=STEPS - WARM_UP,
        warm_up=WARM_UP,
        ragged="\n".join(
            _ragged_row(tokens, name, row, of["in turn"])
            for tokens, of in found["ragged"].items()
            for name, row in of.items()
        ),
    )
    RESULTS.with_suffix(".md").write_text(page)
    print(page)


def engines(path: str) -> dict[str, Any]:
    """Sampling beside the bare engine, in turns, and then a sync."""
    config = load_config(Path(path))
    begun = time.perf_counter()
    parts = build(config, Console(quiet=True))
    start = time.perf_counter() - begun
    with closing(parts.execution):
        execution: Any = parts.execution
        examples = parts.training.rows[: config.prompts_per_step]
        copies = config.algorithm.group_size
        width = max(len(example.prompt_ids) for example in examples)
        shares: dict[str, list[float]] = {"share": [], "share_without": []}
        for repeat in range(REPEATS + 1):
            first = repeat * len(examples) * copies
            rows = prompt_rows(examples, range(len(examples)), copies=copies, first_sample=first)
            begun = time.perf_counter()
            batch = execution.generate(rows, config.sampling, seed=config.seed, prompt_width=width)
            seconds = time.perf_counter() - begun
            for name, sampling in (("share", config.sampling), ("share_without", None)):
                shares[name].append(execution.time_plain_sampling(batch, sampling) / seconds)
        processes = [execution.trainers.workers[0], execution.rollouts.workers[0]]
        for process in processes:
            of(process, _forget_peak)
        begun = time.perf_counter()
        execution.sync_weights()
        seconds = time.perf_counter() - begun
        sizes = [of(process, _peak_beyond) for process in processes]
        groups = of(processes[0], _layer_groups)
    return {
        "start": start,
        **{name: sorted(each[1:]) for name, each in shares.items()},
        "seconds": seconds,
        "bytes": sum(groups),
        "largest": max(groups),
        "peaks": sizes,
    }


def of(worker: Any, function: Callable[[Any], Any]) -> Any:
    """What a function of the worker gives, in its process."""
    import ray

    return ray.get(worker.__ray_call__.remote(function))


def _forget_peak(worker: Any) -> None:
    Path("/proc/self/clear_refs").write_text("5")
    worker.before_sync = Path("/proc/self/status").read_text()


def _peak_beyond(worker: Any) -> int:
    held = re.search(r"VmRSS:\s+(\d+) kB", worker.before_sync)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return (int(peak[1]) - int(held[1])) * 1024 if held and peak else 0


def _layer_groups(worker: Any) -> list[int]:
    from rlprims.execution.ray._transfer import Source

    parts = Source(worker.training.policy.module, worker.shards).parts
    return [sum(info.bytes for info in part) for part in parts]


def ragged(short: int, long: int) -> dict[str, Any]:
    """Steps in each mode. Most responses have ``short`` tokens, those of one prompt ``long``."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        job = _counting_job(Path(folder), short, long)
        for name, settings in MODES.items():
            config = load_config(job, [*settings, f"run_dir={folder}/run"])
            parts = build(config, Console(quiet=True))
            with closing(parts.execution):
                trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
                steps, begun = [], 0.0
                for step in range(STEPS):
                    if step == WARM_UP:
                        begun = time.perf_counter()
                    steps.append(trainer.step().metrics["staleness_max"])
                seconds = (time.perf_counter() - begun) / (STEPS - WARM_UP)
            found[name] = {"seconds": seconds, "staleness": max(steps)}
    return found


def _counting_job(folder: Path, short: int, long: int) -> Path:
    """A model that counts: after ``ci`` comes ``ci+1``, and after the last one the end. So a prompt decides how many
    tokens its responses have, and the engine does the work of any model."""
    words = ["pad", "end", *(f"c{i}" for i in range(long))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="pad"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="pad", eos_token="end").save_pretrained(folder)
    width = 64 * -(-len(words) // 64)  # each word has a dimension of its own
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=width,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=long + 32,
            pad_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()  # they compute, and add nothing
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.eye(len(words), width)
        model.model.embed_tokens.weight.copy_(embedding)
        after = torch.tensor([1, 1, *range(3, len(words)), 1])
        model.lm_head.weight.zero_()
        model.lm_head.weight[after] += 40 / width**0.5 * embedding
    model.save_pretrained(folder)
    data = folder / "data.jsonl"
    asked = [f"c{long - (long if i % PROMPTS == 5 else short)}" for i in range(PROMPTS * STEPS)]
    data.write_text("".join(json.dumps({"question": question, "answer": "0"}) + "\n" for question in asked))
    job = folder / "job.yaml"
    settings = {
        "steps": STEPS + 1,  # the last step begins no batch
        "prompts_per_step": PROMPTS,
        "algorithm": {"preset": "grpo", "group_size": 4, "corrections": ["rlprims.corrections.tis"]},
        "model": {"path": str(folder), "device": "cpu"},
        "data": {"train": str(data), "template": "{question}", "shuffle": False},
        "verifier": "rlprims.rewards.verifiers.gsm8k",
        "sampling": {"max_new_tokens": long + 4},
        "optimizer": {"lr": 1e-6},
        "execution": "ray",
        "ray": {"engine": "vllm", "kv_cache_bytes": 64 << 20},
    }
    job.write_text(yaml.safe_dump(settings))
    return job


def _model_row(name: str, row: dict[str, Any]) -> str:
    shares = " | ".join(_median_of(row[name]) for name in ("share", "share_without"))
    largest = row["largest"]
    peaks = " | ".join(f"{peak / largest:.1f} x" for peak in row["peaks"])
    sync = f"{row['bytes'] / 2**20:.1f} MiB in {row['seconds']:.2f} s"
    return f"| {name} | {row['start']:.0f} s | {shares} | {sync} | {largest / 2**20:.1f} MiB | {peaks} |"


def _median_of(shares: list[float]) -> str:
    return f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"


def _ragged_row(tokens: str, name: str, row: dict[str, Any], in_turn: dict[str, Any]) -> str:
    share = row["seconds"] / in_turn["seconds"]
    return f"| {tokens} | {name} | {row['seconds']:.2f} | {share:.2f} | {row['staleness']:.0f} |"


if __name__ == "__main__":
    main()
