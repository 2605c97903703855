"""A step on a real language model beside TRL's GRPOTrainer: ``python -m benchmarks.smollm_step``.

It needs the model and the questions of ``make demo-llm``, and TRL with peft (``.venv-bench``). The settings are those
of ``examples/smollm/grpo.yaml``: the same model, prompts, samples, adapters, optimizer and algorithm, in float32 with
one thread. Each library runs in a process of its own, in turns, so that its peak memory is its own.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks import _machine, _stages
from benchmarks._peers import peer
from rlprims.execution._observed import _peak_memory
from rlprims.rewards.verifiers import gsm8k

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "smollm" / "grpo.yaml"
RESULTS = Path("docs/benchmarks/smollm_step.json")
PAGE = """\
# A step on SmolLM2-135M beside TRL's GRPOTrainer

Measured by `python -m benchmarks.smollm_step` at {commit}; do not edit.

The job is that of `make demo-llm`:
SmolLM2-135M-Instruct (134.5 M
parameters, 30 layers, a vocabulary of 49152) in float32 with adapters of rank 16 on all linear layers, GRPO without KL,
8 prompts x 8 samples of at most 10 tokens, two updates of 32 responses each, AdamW, one thread. Each library runs in
{rounds} processes of its own, in turns; CPU seconds are medians over the steps of all its processes, the first step of
each left out. Peak memory is the largest resident set of a process, model and libraries included.

| | CPU s of a step | of it sampling | sampled tokens per CPU s | peak memory, GiB |
|---|---:|---:|---:|---:|
{rows}
| **ratio** | {ratio:.2f} | {sampling_ratio:.2f} | {rate_ratio:.2f} | {memory_ratio:.2f} |

The ratio of seconds is TRL's over those of rlprims (above 1 rlprims is faster). The ratios of tokens per second
and of memory are those of rlprims over TRL's (below 1 rlprims needs less memory).

{machine} · {versions} · {date}
"""


def ours(model: Path, data: Path, steps: int) -> dict[str, Any]:
    """CPU seconds and sampled tokens of each step of the local trainer."""
    from rich.console import Console

    from rlprims.trainer.config import load_config
    from rlprims.trainer.loop import Trainer
    from rlprims.trainer.session import build

    with tempfile.TemporaryDirectory() as folder:
        places = [f"model.path={model}", f"data.train={data}", f"data.eval={data}", f"run_dir={folder}/run"]
        config = load_config(CONFIG, [*places, "threads=1", "data.shuffle=false", "recompute_log_probs_every=1000"])
        parts = build(config, Console(quiet=True))
        trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
        by_stage = _stages.timed(parts.execution)
        seconds, tokens = [], []
        for _ in range(steps):
            began = process_time()
            tokens.append(trainer.step().metrics["generated_tokens"])
            seconds.append(process_time() - began)
        parts.execution.close()
    return {"seconds": seconds, "sampling": by_stage["generate"], "tokens": tokens, "peak": _peak_memory()}


def trl(model: Path, data: Path, steps: int) -> dict[str, Any]:
    """The same of TRL's trainer, with a batch of 64 responses in two updates."""
    library, datasets, peft = peer("trl"), peer("datasets"), peer("peft")
    if library is None or datasets is None or peft is None:
        raise SystemExit("the peer of this benchmark is TRL with peft: make bench installs it")
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    asked = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    seconds: list[float] = []
    sampling: list[float] = []
    tokens: list[int] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.began = process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % 2 == 0:  # both updates of a batch
                seconds.append(process_time() - self.began)
                self.began = process_time()

    def score(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
        texts = (completion[0]["content"] for completion in completions)
        return [gsm8k(text, reference)["score"] for text, reference in zip(texts, answer, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        trainer = library.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=score,
            args=library.GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=32,
                generation_batch_size=64,
                num_generations=8,
                max_completion_length=10,
                beta=0.0,
                loss_type="grpo",
                temperature=1.0,
                top_k=0,
                learning_rate=5e-4,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                max_steps=2 * steps,
                shuffle_dataset=False,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                logging_steps=1000,
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=datasets.Dataset.from_list(asked),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            peft_config=peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[Clock()],
        )
        generate = trainer._generate_single_turn

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = process_time()
            result = generate(*args, **kwargs)
            sampling.append(process_time() - began)
            tokens.append(sum(map(len, result[0])))
            return result

        trainer._generate_single_turn = timed
        trainer.train()
    return {"seconds": seconds, "sampling": sampling, "tokens": tokens, "peak": _peak_memory()}


LIBRARIES = {"rlprims": ours, "trl": trl}


def measured(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of each library the steps of all its processes, and the largest peak."""
    names = ("seconds", "sampling", "tokens")
    found: dict[str, dict[str, Any]] = {who: {name: [] for name in names} | {"peak": 0} for who in LIBRARIES}
    for _ in range(options.rounds):
        for who, of in found.items():
            places = ["--model", str(options.model), "--data", str(options.data), "--steps", str(options.steps)]
            command = [sys.executable, "-m", "benchmarks.smollm_step", "--only", who, *places]
            answer = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
            part = json.loads(answer.splitlines()[-1])
            for name in names:
                of[name] += part[name][1:]  # the first step also allocates
            of["peak"] = max(of["peak"], part["peak"])
            print(row(who, of), flush=True)
    return found


def row(who: str, of: dict[str, Any]) -> str:
    step, sampling, rate, memory = numbers(of)
    return f"| {who} | {step:.1f} | {sampling:.1f} | {rate:.0f} | {memory:.2f} |"


def numbers(of: dict[str, Any]) -> tuple[float, float, float, float]:
    """Seconds of a step, of its sampling, tokens per second of sampling, and GiB."""
    return median(of["seconds"]), median(of["sampling"]), sum(of["tokens"]) / sum(of["sampling"]), of["peak"] / 2**30


def page(found: dict[str, Any]) -> str:
    mine, theirs = numbers(found["results"]["rlprims"]), numbers(found["results"]["trl"])
    return PAGE.format(
        commit=found["machine"]["commit"],
        rounds=found["rounds"],
        rows="\n".join(row(who, of) for who, of in found["results"].items()),
        ratio=theirs[0] / mine[0],
        sampling_ratio=theirs[1] / mine[1],
        rate_ratio=mine[2] / theirs[2],
        memory_ratio=mine[3] / theirs[3],
        machine=found["machine"]["cpu"],
        versions=", ".join(f"{package} {version}" for package, version in found["versions"].items()),
        date=found["date"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.smollm_step", description="A step beside TRL's, on SmolLM2-135M.")
    parser.add_argument("--model", type=Path, default=Path("runs/smollm-base"), help="of examples/smollm/fetch.py")
    parser.add_argument(
        "--data", type=Path, default=Path("runs/smollm-data/train.jsonl"), help="of arithmetic.py there"
    )
    parser.add_argument("--steps", type=int, default=4, help="of a process; the first is not counted")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each library")
    parser.add_argument("--only", choices=LIBRARIES, help="one process; prints its numbers as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON, with a page beside it")
    options = parser.parse_args()
    for path in (options.model, options.data):
        if not path.exists():
            raise SystemExit(f"there is no {path}: run examples/smollm/fetch.py and examples/smollm/arithmetic.py")
    torch.set_num_threads(1)
    if options.only:
        print(json.dumps(LIBRARIES[options.only](options.model.resolve(), options.data.resolve(), options.steps)))
        return
    found = {
        "rounds": options.rounds,
        "results": measured(options),
        "date": datetime.date.today().isoformat(),
        "machine": _machine.describe(),
        "versions": _machine.versions(),
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    options.out.with_suffix(".md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
