"""The words task: short arithmetic stories with one checkable answer, and a teacher who is often wrong.

The task has the shape of grade-school word problems, but is made from nothing: a random generator in, a story
and its answer out. So it needs no download, and it can never run out of problems.

    Bob has 19 apples. Bob gets 4 apples. Bob sells 9 apples. How many?
    <think>19+4=23,23-9=14</think><answer>14</answer>

The teacher exists to give reinforcement learning something to mend. It shows every skill that the task needs
(reading, arithmetic, the answer format), but it usually adds where it should subtract, reads "doubles" as "plus
two", sometimes checks a step again and again, and sometimes forgets the tags. A model trained on its text can do
the task but usually does not; rewards alone are then enough to make it.

    python examples/words/words.py --out runs/words-data
"""

import argparse
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from random import Random

NAMES = ("Ann", "Bob", "Eve", "Max", "Tom", "Zoe")
THINGS = ("apples", "eggs", "figs", "nuts", "pears", "plums")
VERBS = {"+": ("gets", "buys", "finds"), "-": ("sells", "eats", "loses"), "*": ("doubles",)}

LARGEST = 50  # no value on the way to a right answer is larger than this, or negative

CONFUSE = 0.7  # chance that the teacher adds where it should subtract or double
SLIP = 0.03  # chance that a result is wrong by one
RAMBLE = 0.4  # chance of writing the last step once more, then once more again, ...
NO_FORMAT = 0.15  # chance of forgetting the tags

TRAIN_ROWS, TRAIN_SEED = 8192, 1
EVAL_ROWS, EVAL_SEED = 150, 2


@dataclass(frozen=True)
class Step:
    """One sentence of the story: what happens to the number of things."""

    verb: str
    operation: str  # "+", "-" or "*"
    amount: int


@dataclass(frozen=True)
class Problem:
    """A story: somebody has some things, then the steps happen."""

    name: str
    thing: str
    start: int
    steps: tuple[Step, ...]

    @property
    def question(self) -> str:
        """The story as text. It is the whole prompt."""
        sentences = [f"{self.name} has {self.start} {self.thing}."]
        for step in self.steps:
            what = "them" if step.operation == "*" else f"{step.amount} {self.thing}"
            sentences.append(f"{self.name} {step.verb} {what}.")
        return " ".join([*sentences, "How many?"])

    @property
    def answer(self) -> str:
        """The right number."""
        value = self.start
        for step in self.steps:
            value = calculate(value, step.operation, step.amount)
        return str(value)


def calculate(value: int, operation: str, amount: int) -> int:
    """`value operation amount`, for the three operations of the task."""
    if operation == "+":
        return value + amount
    if operation == "-":
        return value - amount
    return value * amount


def problem(rng: Random) -> Problem:
    """A random story of one to five steps whose values all stay between 0 and `LARGEST`."""
    start = value = rng.randint(2, 20)
    steps: list[Step] = []
    length = rng.randint(1, 5)
    while len(steps) < length:
        operation = rng.choice(tuple(VERBS))
        amount = 2 if operation == "*" else rng.randint(2, 9)
        after = calculate(value, operation, amount)
        if 0 <= after <= LARGEST:
            steps.append(Step(rng.choice(VERBS[operation]), operation, amount))
            value = after
    return Problem(rng.choice(NAMES), rng.choice(THINGS), start, tuple(steps))


def teacher(problem: Problem, rng: Random) -> str:
    """What the unreliable teacher writes for a story: often wrong, sometimes long, sometimes without tags."""
    value = problem.start
    written: list[str] = []
    for step in problem.steps:
        # Having gone wrong before, the teacher may have too few things left to take any away. Then it adds.
        impossible = step.operation == "-" and value < step.amount
        operation = "+" if impossible or rng.random() < CONFUSE else step.operation
        result = calculate(value, operation, step.amount)
        if rng.random() < SLIP:
            result = max(0, result + rng.choice((-1, 1)))
        line = f"{value}{operation}{step.amount}={result}"
        written.append(line)
        while rng.random() < RAMBLE:
            written.append("~" + line)
        value = result
    thoughts = ",".join(written)
    if rng.random() < NO_FORMAT:
        return thoughts
    return f"<think>{thoughts}</think><answer>{value}</answer>"


def new_problem(rng: Random, exclude: Collection[str]) -> Problem:
    """A random story whose question is not in `exclude`."""
    while True:
        candidate = problem(rng)
        if candidate.question not in exclude:
            return candidate


def questions(path: Path) -> set[str]:
    """All questions in a file that `write_jsonl` wrote."""
    with path.open(encoding="utf-8") as lines:
        return {json.loads(line)["question"] for line in lines}


def write_jsonl(path: Path, n: int, seed: int, exclude: Collection[str] = ()) -> None:
    """Write `n` different problems, none of them in `exclude`, one JSON object on each line.

    The file appears whole or not at all, and is the same, byte for byte, for the same arguments.
    """
    rng = Random(seed)
    seen = set(exclude)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("w", encoding="utf-8") as file:
        for _ in range(n):
            one = new_problem(rng, seen)
            seen.add(one.question)
            row = {
                "question": one.question,
                "answer": one.answer,
                "data_source": f"words/{len(one.steps)}",
            }
            file.write(json.dumps(row) + "\n")
    unfinished.replace(path)


def write_splits(folder: Path) -> tuple[Path, Path]:
    """Write `train.jsonl` and `eval.jsonl`; no question is in both."""
    train, held_out = folder / "train.jsonl", folder / "eval.jsonl"
    write_jsonl(held_out, EVAL_ROWS, EVAL_SEED)
    write_jsonl(train, TRAIN_ROWS, TRAIN_SEED, exclude=questions(held_out))
    return train, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the train and eval questions of the words task.")
    parser.add_argument("--out", type=Path, default=Path("runs/words-data"), help="folder for the two files")
    parser.add_argument("--show", type=int, default=3, help="how many examples to print")
    arguments = parser.parse_args()

    train, held_out = write_splits(arguments.out)
    print(f"wrote {train} ({TRAIN_ROWS} rows) and {held_out} ({EVAL_ROWS} rows)")
    rng = Random(0)
    for _ in range(arguments.show):
        example = problem(rng)
        print(f"\n{example.question}  (answer: {example.answer})\n  teacher: {teacher(example, rng)}")


if __name__ == "__main__":
    main()
