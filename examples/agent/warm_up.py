"""Make the base model of the agent task: the words model, trained from scratch on the teacher's episodes.

One text is a whole episode: the story, then the teacher's turns, each with an end token, and the calculator's answers
between them. Only the teacher's tokens are trained on. It takes one CPU thread about two minutes.

    python examples/agent/warm_up.py                  # runs/agent-base and runs/agent-data
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "words"))
import torch
import warm_up as words  # the model and its training are those of the words task
from stories import CALL, GUESS, NO_FORMAT, UNCLOSED, VERBS, new_story, teacher, write_splits
from tokenizer import build_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

UPDATES = 1500
TAGS = ("<calculate>", "</calculate>", "<result>", "</result>")

Text = tuple[list[int], list[bool]]  # the tokens of an episode, and which of them the teacher wrote


def episode(tokenizer: PreTrainedTokenizerFast, rng: Random, held_out: set[str]) -> Text:
    story = new_story(rng, held_out)
    ids = tokenizer.encode(story.question)
    written = [False] * len(ids)
    for turn, result in teacher(story, rng):
        for text, ends, is_teacher in ((turn, [tokenizer.eos_token_id], True), (result, [], False)):
            tokens = [*tokenizer.encode(text), *ends]
            ids += tokens
            written += [is_teacher] * len(tokens)
    return ids, written


def batches(tokenizer: PreTrainedTokenizerFast, held_out: set[str], rng: Random) -> Iterator[words.Batch]:
    """Endless fresh episodes, never about a held-out story, with texts of similar length together."""
    while True:
        pool = sorted((episode(tokenizer, rng, held_out) for _ in range(2048)), key=lambda text: len(text[0]))
        ready: list[words.Batch] = []
        while pool:
            rows = max(1, words.TOKENS_PER_UPDATE // len(pool[-1][0]))
            ready.append(pad(pool[-rows:], tokenizer.pad_token_id))
            del pool[-rows:]
        rng.shuffle(ready)
        yield from ready


def pad(texts: list[Text], pad_id: int) -> tuple[Tensor, Tensor]:
    """Right-padded token ids, and a mask that is true on the teacher's tokens."""
    width = max(len(ids) for ids, _ in texts)
    ids = torch.tensor([[*ids, *[pad_id] * (width - len(ids))] for ids, _ in texts])
    mask = torch.tensor([[*written, *[False] * (width - len(written))] for _, written in texts])
    return ids, mask


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the base model and the stories of the agent task.")
    parser.add_argument("--out", type=Path, default=Path("runs/agent-base"), help="folder for the model")
    parser.add_argument("--data", type=Path, default=Path("runs/agent-data"), help="folder for the stories")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the teacher's text")
    parser.add_argument("--updates", type=int, default=UPDATES, help="fewer make a base that cannot learn well")
    arguments = parser.parse_args()

    settings = {"seed": arguments.seed, "updates": arguments.updates, "call": CALL, "guess": GUESS}
    settings |= {"unclosed": UNCLOSED, "no_format": NO_FORMAT}
    _, eval_file = write_splits(arguments.data)
    if arguments.out.exists():
        if words.finished_settings(arguments.out) == settings:
            print(f"{arguments.out} already holds this base; nothing to do")
            return 0
        print(f"{arguments.out} exists and is not this base: choose another --out", file=sys.stderr)
        return 2

    torch.set_num_threads(1)
    disable_progress_bar()  # hides the library's bar while it saves
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer(words.CONTEXT, more=[*TAGS, *(f" {verb}" for verb in VERBS["*"][1:])])
    model = words.build_model(tokenizer)
    started = time.monotonic()
    loss = words.train(model, batches(tokenizer, words.questions(eval_file), Random(arguments.seed)), arguments.updates)
    words.save(arguments.out, model, tokenizer, settings)
    print(f"{arguments.out}: loss {loss:.3f}, {time.monotonic() - started:.0f} s; stories in {arguments.data}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
