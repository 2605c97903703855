"""The arithmetic task: sums and products of two digits, in plain questions that do not say how to answer.

    What is 7 + 8?

SmolLM2 knows most of the answers, but it explains first and rarely reaches the number within ten tokens. It has to
learn to answer, and then to answer right. There are 145 questions, and a third is held out. A pair of digits is asked
in both orders, and both are in the same file.

    python examples/smollm/arithmetic.py --out runs/smollm-data
"""

import argparse
import json
from itertools import combinations_with_replacement
from pathlib import Path
from random import Random

OPERATIONS = {"sums": ("+", range(1, 10)), "products": ("*", range(2, 10))}
SEED = 0


def rows(source: str, pairs: list[tuple[int, int]]) -> list[dict[str, str]]:
    """A row for each order of each pair."""
    sign, _ = OPERATIONS[source]
    orders = [order for a, b in pairs for order in dict.fromkeys([(a, b), (b, a)])]
    answer = {"+": lambda a, b: a + b, "*": lambda a, b: a * b}[sign]
    return [
        {"question": f"What is {a} {sign} {b}?", "answer": str(answer(a, b)), "data_source": f"arithmetic/{source}"}
        for a, b in orders
    ]


def write_splits(folder: Path) -> tuple[Path, Path]:
    """Write `train.jsonl` and `eval.jsonl`; no pair of digits is in both for the same operation."""
    rng = Random(SEED)
    train: list[dict[str, str]] = []
    held_out: list[dict[str, str]] = []
    for source, (_, digits) in OPERATIONS.items():
        pairs = list(combinations_with_replacement(digits, 2))
        rng.shuffle(pairs)
        third = len(pairs) // 3
        held_out += rows(source, pairs[:third])
        train += rows(source, pairs[third:])
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("eval", held_out)):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder / "train.jsonl", folder / "eval.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the train and eval questions of the arithmetic task.")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm-data"), help="folder for the two files")
    arguments = parser.parse_args()
    for path in write_splits(arguments.out):
        print(f"{path}: {len(path.read_text(encoding='utf-8').splitlines())} questions")


if __name__ == "__main__":
    main()
