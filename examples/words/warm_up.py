"""Make the base model of the words task: train a small Llama from scratch on the unreliable teacher's text.

The result is an ordinary Hugging Face folder (weights, config, tokenizer), so every backend can load it. It is made
on one CPU thread in about two minutes. Do not make it cheaper by training for fewer updates: reinforcement learning
chooses among the skills that the base has, and a half-trained base misreads sentences and miscounts steps.

    python examples/words/warm_up.py                  # runs/words-base and runs/words-data
    python examples/words/warm_up.py --seed 2 --out runs/words-base-2
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

# Threads that wait by spinning slow down everything else on a busy machine. Both must be set before torch starts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizer import build_tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar
from words import CONFUSE, LARGEST, NO_FORMAT, RAMBLE, SLIP, new_problem, questions, teacher, write_splits

CONTEXT = 128  # positions the model is built for; the longest question has about 40 tokens
ROPE_BASE = 100.0  # the usual 10,000 is meant for long texts; over 128 positions this one learns faster
LONGEST_RESPONSE = 64  # the teacher's longer texts are cut here: training sequences stay short
UPDATES = 1700
TOKENS_PER_UPDATE = 2048
BATCHES_PER_POOL = 64  # texts are sorted by length inside a pool of this many batches
MATRIX_RATE, MATRIX_DECAY = 0.005, 0.2
OTHER_RATE = 0.01
CONSTANT_FRACTION = 0.4  # of the updates; the learning rates then fall to zero on a straight line
SETTINGS_FILE = "warm_up.json"  # in the model's folder: says how the model was made

Batch = tuple[Tensor, Tensor]  # token ids, and which of them count in the loss; both (sequences, positions)


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """About 120,000 parameters, in a shape that serving engines accept too (heads of 32).

    It is a Llama because `AutoTokenizer` then loads the tokenizer that lies beside the weights. For some other
    model types (Qwen2 is one) it builds that family's own tokenizer from our vocabulary, which silently drops words.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        head_dim=32,
        num_attention_heads=4,  # with two heads the base reads the wrong sentence too often, whatever the seed
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,  # a text starts with its first word
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def batches(tokenizer: PreTrainedTokenizerFast, held_out: set[str], rng: Random) -> Iterator[Batch]:
    """Endless fresh teacher text, never about a held-out question, with sequences of like length together."""
    while True:
        pool: list[tuple[list[int], int]] = []
        size = 0
        while size < BATCHES_PER_POOL * TOKENS_PER_UPDATE:
            problems = [new_problem(rng, held_out) for _ in range(256)]
            prompts = tokenizer([one.question for one in problems], verbose=False)["input_ids"]
            responses = tokenizer([teacher(one, rng) for one in problems], verbose=False)["input_ids"]
            for prompt, response in zip(prompts, responses, strict=True):
                ended = [*response, tokenizer.eos_token_id][:LONGEST_RESPONSE]
                pool.append((prompt + ended, len(prompt)))
                size += len(prompt) + len(ended)
        pool.sort(key=lambda item: len(item[0]))
        ready: list[Batch] = []
        while pool:
            rows = max(1, TOKENS_PER_UPDATE // len(pool[-1][0]))
            ready.append(pad(pool[-rows:], tokenizer.pad_token_id))
            del pool[-rows:]
        rng.shuffle(ready)
        yield from ready


def pad(items: list[tuple[list[int], int]], pad_id: int) -> Batch:
    """Right-padded token ids, and a mask that is true on the response and its end."""
    width = max(len(tokens) for tokens, _ in items)
    ids = torch.full((len(items), width), pad_id)
    counts = torch.zeros((len(items), width), dtype=torch.bool)
    for row, (tokens, prompt_length) in enumerate(items):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        counts[row, prompt_length : len(tokens)] = True
    return ids, counts


def response_loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Mean cross-entropy of the response tokens, each predicted from all that stands before it."""
    ids, counts = batch
    # Padding is on the right and attention looks left, so no attention mask is needed.
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    chosen = counts[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[chosen]), ids[:, 1:][chosen])


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    ours = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in ours]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=MATRIX_DECAY),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(model: LlamaForCausalLM, data: Iterator[Batch], updates: int) -> float:
    """Train in place and return the running mean of the loss at the end."""
    optimizers = build_optimizers(model)

    def rate(update: int) -> float:
        return min(1.0, (updates - update) / (updates * (1 - CONSTANT_FRACTION)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    columns = (
        TextColumn("warm-up"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} updates"),
        TextColumn("{task.fields[speed]:.1f}/s"),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    model.train()
    mean = float("nan")
    started = time.monotonic()
    with Progress(*columns) as progress:
        task = progress.add_task("warm-up", total=updates, loss=mean, speed=0.0)
        for update in range(1, updates + 1):
            loss = response_loss(model, next(data))
            loss.backward()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            mean = loss.item() if update == 1 else 0.98 * mean + 0.02 * loss.item()
            speed = update / (time.monotonic() - started)
            progress.update(task, advance=1, loss=mean, speed=speed)
    return mean


def save(out: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: dict[str, float]) -> None:
    """Write everything beside `out`, then rename, so that `out` is never half a model."""
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    (unfinished / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if out.exists():
        shutil.rmtree(out)
    unfinished.rename(out)


def finished_settings(out: Path) -> dict[str, float] | None:
    """The settings of the finished model in `out`, or None where there is none."""
    file = out / SETTINGS_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the base model and the questions of the words task.")
    parser.add_argument("--out", type=Path, default=Path("runs/words-base"), help="folder for the model")
    parser.add_argument("--data", type=Path, default=Path("runs/words-data"), help="folder for the questions")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the teacher's text")
    parser.add_argument("--updates", type=int, default=UPDATES, help="fewer make a base that cannot learn well")
    parser.add_argument("--force", action="store_true", help="replace what --out already holds")
    arguments = parser.parse_args()
    if arguments.updates < 1:
        parser.error(f"--updates is {arguments.updates}; it must be at least 1")
    return arguments


def settings_of(arguments: argparse.Namespace) -> dict[str, float]:
    """All that decides what the model will be. A model made with other settings is another model."""
    return {
        "seed": arguments.seed,
        "updates": arguments.updates,
        "tokens_per_update": TOKENS_PER_UPDATE,
        "longest_response": LONGEST_RESPONSE,
        "matrix_rate": MATRIX_RATE,
        "matrix_decay": MATRIX_DECAY,
        "other_rate": OTHER_RATE,
        "rope_base": ROPE_BASE,
        "largest": LARGEST,
        "confuse": CONFUSE,
        "slip": SLIP,
        "ramble": RAMBLE,
        "no_format": NO_FORMAT,
    }


def main() -> int:
    arguments = parse_arguments()
    settings = settings_of(arguments)
    out: Path = arguments.out
    _, eval_file = write_splits(arguments.data)

    if out.exists() and not arguments.force:
        if finished_settings(out) == settings:
            print(f"{out} already holds this base; nothing to do (--force makes it again)")
            return 0
        print(f"{out} exists and is not this base: choose another --out, or --force to replace it", file=sys.stderr)
        return 2

    torch.set_num_threads(1)
    disable_progress_bar()  # the library draws one for saving; ours is enough
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer(CONTEXT)
    model = build_model(tokenizer)
    data = batches(tokenizer, questions(eval_file), Random(arguments.seed))
    started = time.monotonic()
    loss = train(model, data, arguments.updates)
    save(out, model, tokenizer, settings)
    seconds = time.monotonic() - started
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{out}: {size:,} parameters, loss {loss:.3f}, {seconds:.0f} s; questions in {arguments.data}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
