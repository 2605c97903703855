"""Make the base model of the dots task: train a small model with vision from scratch on the unreliable teacher's text.

The result is an ordinary Hugging Face folder (weights, config, tokenizer, processor). It is made on one CPU thread in
about a minute.

    python examples/dots/warm_up.py                  # runs/dots-base and runs/dots-data
    python examples/dots/warm_up.py --seed 2 --out runs/dots-base-2
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
from dots import CELLS, CONFUSE, NO_FORMAT, SIDE, problem, teacher, write_splits
from processor import build_processor
from rich.progress import track
from torch import Tensor
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

CONTEXT = 64  # positions the model is built for; the longest text has about 33 tokens
UPDATES = 800
CAREFUL_FRACTION = 0.7  # of the updates; until then the teacher is never confused, and the model learns to see
ROWS_PER_UPDATE = 64
PICTURES = 8192  # they are used again and again, with new answers of the teacher
MATRIX_RATE, MATRIX_DECAY = 0.005, 0.1
OTHER_RATE = 0.006
CONSTANT_FRACTION = 0.4  # of the updates; the learning rates then fall to zero on a straight line
SETTINGS_FILE = "warm_up.json"  # in the model's folder: says how the model was made

Batch = tuple[dict[str, Tensor], Tensor]  # the model's inputs, and which tokens count in the loss


def build_model(processor: Idefics3Processor) -> Idefics3ForConditionalGeneration:
    """A tower of one layer that sees a cell of a picture as one patch, and a Llama of two layers."""
    tokenizer = processor.tokenizer
    vision = {
        "image_size": SIDE,
        "patch_size": SIDE // CELLS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        scale_factor=1,
        image_token_id=processor.image_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def batches(processor: Idefics3Processor, rng: Random, careful: int) -> Iterator[Batch]:
    """Endless batches of a pool of pictures with fresh text of the teacher, who is not confused in the first ones."""
    problems = [problem(rng) for _ in range(PICTURES)]
    pixels = processor.image_processor([[one.picture()] for one in problems], return_tensors="pt")
    chats = [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": p.question}]}] for p in problems]
    texts = [processor.apply_chat_template(chat, tokenize=False) for chat in chats]
    asked = processor(text=texts, images=[[one.picture()] for one in problems], add_special_tokens=False)["input_ids"]
    tokenizer, made = processor.tokenizer, 0
    while True:
        order = list(range(PICTURES))
        rng.shuffle(order)
        for start in range(0, PICTURES, ROWS_PER_UPDATE):
            chosen = order[start : start + ROWS_PER_UPDATE]
            confuse, made = 0.0 if made < careful else CONFUSE, made + 1
            said = [teacher(problems[i], rng, confuse) for i in chosen]
            answers = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in said]
            rows = [asked[i] + answer for i, answer in zip(chosen, answers, strict=True)]
            width = max(map(len, rows))
            ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
            counts = torch.zeros(ids.shape, dtype=torch.bool)
            for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
                counts[i, len(row) - len(answer) : len(row)] = True
            yield {"input_ids": ids, **{name: x[chosen] for name, x in pixels.items()}}, counts


def response_loss(model: Idefics3ForConditionalGeneration, batch: Batch) -> Tensor:
    """Mean cross-entropy of the response tokens. Padding is on the right, so that no attention mask is needed."""
    inputs, counts = batch
    hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1]
    chosen = counts[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[chosen]), inputs["input_ids"][:, 1:][chosen])


def build_optimizers(model: Idefics3ForConditionalGeneration) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, norms and the rest."""
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "layers" in name]
    ours = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in ours]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=MATRIX_DECAY),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(model: Idefics3ForConditionalGeneration, data: Iterator[Batch], updates: int) -> float:
    """Train in place and return the running mean of the loss at the end."""
    optimizers = build_optimizers(model)

    def rate(update: int) -> float:
        return min(1.0, (update + 1) / 30, (updates - update) / (updates * (1 - CONSTANT_FRACTION)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    model.train()
    mean = float("nan")
    for update in track(range(updates), "warm-up"):
        loss = response_loss(model, next(data))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        mean = loss.item() if update == 0 else 0.98 * mean + 0.02 * loss.item()
    return mean


def save(
    out: Path,
    model: Idefics3ForConditionalGeneration,
    processor: Idefics3Processor,
    settings: dict[str, float],
) -> None:
    """Write everything beside `out`, then rename, so that `out` is never half a model."""
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    processor.save_pretrained(unfinished)
    (unfinished / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if out.exists():
        shutil.rmtree(out)
    unfinished.rename(out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the base model and the pictures of the dots task.")
    parser.add_argument("--out", type=Path, default=Path("runs/dots-base"), help="folder for the model")
    parser.add_argument("--data", type=Path, default=Path("runs/dots-data"), help="folder for pictures and questions")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the pictures and the teacher's text")
    parser.add_argument("--updates", type=int, default=UPDATES, help="fewer make a base that cannot learn well")
    parser.add_argument("--force", action="store_true", help="replace what --out already holds")
    arguments = parser.parse_args()
    if arguments.updates < 1:
        parser.error(f"--updates is {arguments.updates}; it must be at least 1")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    out: Path = arguments.out
    settings = {"seed": arguments.seed, "updates": arguments.updates, "rows_per_update": ROWS_PER_UPDATE}
    settings |= {"matrix_rate": MATRIX_RATE, "matrix_decay": MATRIX_DECAY, "other_rate": OTHER_RATE}
    settings |= {"pictures": PICTURES, "careful": CAREFUL_FRACTION, "confuse": CONFUSE, "no_format": NO_FORMAT}
    write_splits(arguments.data)

    if out.exists() and not arguments.force:
        file = out / SETTINGS_FILE
        if file.exists() and json.loads(file.read_text(encoding="utf-8")) == settings:
            print(f"{out} already holds this base; nothing to do (--force makes it again)")
            return 0
        print(f"{out} exists and is not this base: choose another --out, or --force to replace it", file=sys.stderr)
        return 2

    torch.set_num_threads(1)
    disable_progress_bar()  # the library draws one for saving; ours is enough
    set_verbosity_error()
    torch.manual_seed(arguments.seed)
    processor = build_processor(CONTEXT)
    model = build_model(processor)
    started = time.monotonic()
    data = batches(processor, Random(1000 + arguments.seed), round(CAREFUL_FRACTION * arguments.updates))
    loss = train(model, data, arguments.updates)
    save(out, model, processor, settings)
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{out}: {size:,} parameters, loss {loss:.3f}, {time.monotonic() - started:.0f} s; data in {arguments.data}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
