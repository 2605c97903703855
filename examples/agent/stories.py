"""Stories with sums that are easy and products that are hard, and a teacher who calls a calculator at random.

    Bob has 19 apples. Bob gets 4 apples. Bob triples them. How many?
    19+4=23,<calculate>23*3</calculate>     the model's first turn: an easy step in the head, a call for the hard one
    <result>69</result>                     the calculator's answer
    <answer>69</answer>                     the model's second turn

The teacher adds and subtracts well and multiplies badly. It calls the calculator at random, for one step in three.
Sometimes it forgets to close a call, or the tags of the answer. A model trained on its text has every skill that the
task needs, but does not know when to use which. With rewards alone it learns to call the calculator for products.

    python examples/agent/stories.py --out runs/agent-data
"""

import argparse
import json
import sys
from collections.abc import Collection
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "words"))
from words import NAMES, THINGS, Problem, Step, calculate

VERBS = {"+": ("gets", "buys", "finds"), "-": ("sells", "eats", "loses"), "*": ("doubles", "triples", "quadruples")}
FACTORS = {"doubles": 2, "triples": 3, "quadruples": 4}

LARGEST = 99  # every value is between 0 and this

CALL = 0.35  # chance that the teacher calls for a step, hard or easy
GUESS = 0.85  # chance that a product in the head is wrong
UNCLOSED = 0.08  # chance that a call is not closed
NO_FORMAT = 0.1  # chance of forgetting the tags of the answer

TRAIN_ROWS, TRAIN_SEED = 8192, 1
EVAL_ROWS, EVAL_SEED = 150, 2

Turn = tuple[str, str]
"""The teacher's text, and the calculator's answer, which is empty after the last turn."""


def new_story(rng: Random, exclude: Collection[str] = ()) -> Problem:
    """A random story of two or three steps, at least one of them a product, whose question is not in `exclude`."""
    while True:
        start = value = rng.randint(2, 30)
        steps: list[Step] = []
        length = rng.randint(2, 3)
        while len(steps) < length:
            operation = rng.choice(tuple(VERBS))
            verb = rng.choice(VERBS[operation])
            amount = FACTORS[verb] if operation == "*" else rng.randint(2, 9)
            after = calculate(value, operation, amount)
            if 0 <= after <= LARGEST:
                steps.append(Step(verb, operation, amount))
                value = after
        story = Problem(rng.choice(NAMES), rng.choice(THINGS), start, tuple(steps))
        if any(step.operation == "*" for step in steps) and story.question not in exclude:
            return story


def teacher(story: Problem, rng: Random) -> list[Turn]:
    """An episode as the teacher plays it: often wrong, because it multiplies in the head."""
    value, turns, written = story.start, list[Turn](), ""
    for step in story.steps:
        operation = "+" if step.operation == "-" and value < step.amount else step.operation  # it went wrong before
        formula, right = f"{value}{operation}{step.amount}", calculate(value, operation, step.amount)
        if rng.random() < CALL:
            if rng.random() < UNCLOSED:  # the calculator says so, and the teacher calls again
                turns.append((f"{written}<calculate>{formula}", "<result>?</result>"))
                written = ""
            turns.append((f"{written}<calculate>{formula}</calculate>", f"<result>{right}</result>"))
            written, value = "", right
            continue
        wrong = operation == "*" and rng.random() < GUESS
        value = max(0, right + rng.choice((-4, -3, -2, -1, 1, 2, 3, 4))) if wrong else right
        written += f"{formula}={value},"
    answer = f"{value}" if rng.random() < NO_FORMAT else f"<answer>{value}</answer>"
    return [*turns, (written + answer, "")]


def write_splits(folder: Path) -> tuple[Path, Path]:
    """Write `train.jsonl` and `eval.jsonl`; no question is in both."""
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    files = []
    for name, rows, seed in (("eval", EVAL_ROWS, EVAL_SEED), ("train", TRAIN_ROWS, TRAIN_SEED)):
        rng, lines = Random(seed), list[str]()
        for _ in range(rows):
            story = new_story(rng, seen)
            seen.add(story.question)
            products = sum(step.operation == "*" for step in story.steps)
            row = {"question": story.question, "answer": story.answer, "data_source": f"products/{products}"}
            lines.append(json.dumps(row) + "\n")
        files.append(folder / f"{name}.jsonl")
        files[-1].write_text("".join(lines), encoding="utf-8")
    return files[1], files[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the train and eval stories of the agent task.")
    parser.add_argument("--out", type=Path, default=Path("runs/agent-data"), help="folder for the two files")
    parser.add_argument("--show", type=int, default=3, help="how many episodes of the teacher to print")
    arguments = parser.parse_args()

    train, held_out = write_splits(arguments.out)
    print(f"wrote {train} ({TRAIN_ROWS} rows) and {held_out} ({EVAL_ROWS} rows)")
    rng = Random(0)
    for _ in range(arguments.show):
        story = new_story(rng)
        print(f"\n{story.question}  (answer: {story.answer})")
        for written, answered in teacher(story, rng):
            print(f"  teacher: {written}\n  result:  {answered}" if answered else f"  teacher: {written}")


if __name__ == "__main__":
    main()
