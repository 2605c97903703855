"""The dots task: a small picture, a question about it with one checkable answer, and a teacher who is often wrong.

A picture has 32 x 32 pixels and up to eight dots in three colours. There are three kinds of questions:

    How many dots?                 <answer>3</answer>
    Where is the largest dot?      <answer>top left</answer>
    Which colour has the largest dot?     <answer>red</answer>

The teacher shows every skill that the task needs (seeing colours, sizes and places, counting, the answer's format), but
it often forgets to count a dot, or answers for the smallest dot, and sometimes forgets the tags. A model trained on its
text can do the task but usually does not; rewards alone are then enough to make it.

    python examples/dots/dots.py --out runs/dots-data
"""

import argparse
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

SIDE, CELLS = 32, 4  # pixels on a side of a picture, and cells of which each has one dot at most
COLOURS = {"red": (225, 40, 40), "green": (40, 180, 60), "blue": (50, 90, 235)}
PLACES = ("top left", "top right", "bottom left", "bottom right")
FEWEST, MOST = 2, 8  # dots

QUESTIONS = {
    "count": "How many dots?",
    "where": "Where is the largest dot?",
    "colour": "Which colour has the largest dot?",
}

CONFUSE = 0.75  # chance that the teacher forgets a dot, or answers for the smallest one
NO_FORMAT = 0.15  # chance of forgetting the tags

TRAIN_ROWS, TRAIN_SEED = 3072, 1
EVAL_ROWS, EVAL_SEED = 200, 2


@dataclass(frozen=True)
class Dot:
    """A dot in a cell of the picture."""

    row: int
    column: int
    diameter: int
    colour: str

    @property
    def place(self) -> str:
        """The quarter of the picture that it is in."""
        return PLACES[2 * (self.row >= CELLS // 2) + (self.column >= CELLS // 2)]


@dataclass(frozen=True)
class Problem:
    """A picture, and the kind of question about it."""

    dots: tuple[Dot, ...]
    kind: str

    @property
    def question(self) -> str:
        return QUESTIONS[self.kind]

    @property
    def answer(self) -> str:
        return self.answer_for(max(self.dots, key=lambda dot: dot.diameter), len(self.dots))

    @property
    def confused(self) -> str:
        """The answer of a teacher that is wrong."""
        return self.answer_for(min(self.dots, key=lambda dot: dot.diameter), len(self.dots) - 1)

    def answer_for(self, dot: Dot, count: int) -> str:
        return {"count": str(count), "where": dot.place, "colour": dot.colour}[self.kind]

    def picture(self) -> Image.Image:
        """The dots on white."""
        image, cell = Image.new("RGB", (SIDE, SIDE), "white"), SIDE // CELLS
        draw = ImageDraw.Draw(image)
        for dot in self.dots:
            left, top = (cell * at + (cell - dot.diameter) // 2 for at in (dot.column, dot.row))
            box = (left, top, left + dot.diameter - 1, top + dot.diameter - 1)
            draw.ellipse(box, fill=COLOURS[dot.colour])
        return image


def problem(rng: Random) -> Problem:
    """A random picture and question. One dot alone is the largest, and one alone the smallest."""
    cells = rng.sample([(row, column) for row in range(CELLS) for column in range(CELLS)], rng.randint(FEWEST, MOST))
    diameters = [8, 3, *([5] * (len(cells) - 2))]
    dots = [Dot(*cell, diameter, rng.choice(list(COLOURS))) for cell, diameter in zip(cells, diameters, strict=True)]
    return Problem(tuple(dots), rng.choice(list(QUESTIONS)))


def teacher(one: Problem, rng: Random, confuse: float = CONFUSE) -> str:
    """What the unreliable teacher answers: often wrong, sometimes without tags."""
    answer = one.confused if rng.random() < confuse else one.answer
    return answer if rng.random() < NO_FORMAT else f"<answer>{answer}</answer>"


def write_rows(folder: Path, name: str, n: int, seed: int) -> Path:
    """Write `n` problems: `name`.jsonl, and the pictures in the folder `name` beside it."""
    rng, file = Random(seed), folder / f"{name}.jsonl"
    unfinished = folder / f".{name}.{os.getpid()}"
    (unfinished / name).mkdir(parents=True)
    with (unfinished / file.name).open("w", encoding="utf-8") as lines:
        for number in range(n):
            one, path = problem(rng), f"{name}/{number:05}.png"
            one.picture().save(unfinished / path)
            said = {"answer": one.answer, "response": f"<answer>{one.answer}</answer>"}
            row = {"question": one.question, "image": path, **said, "data_source": f"dots/{one.kind}"}
            lines.write(json.dumps(row) + "\n")
    shutil.rmtree(folder / name, ignore_errors=True)
    for made in (unfinished / name, unfinished / file.name):
        made.replace(folder / made.name)
    unfinished.rmdir()
    return file


def write_splits(folder: Path) -> tuple[Path, Path]:
    """Write `train.jsonl` and `eval.jsonl` with their pictures. There are 10^11 pictures: those of eval are new."""
    return write_rows(folder, "train", TRAIN_ROWS, TRAIN_SEED), write_rows(folder, "eval", EVAL_ROWS, EVAL_SEED)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the pictures and questions of the dots task.")
    parser.add_argument("--out", type=Path, default=Path("runs/dots-data"), help="folder for files and pictures")
    arguments = parser.parse_args()
    train, held_out = write_splits(arguments.out)
    print(f"wrote {train} ({TRAIN_ROWS} rows) and {held_out} ({EVAL_ROWS} rows)")
    rng = Random(0)
    for _ in range(3):
        one = problem(rng)
        print(f"\n{one.question}  (answer: {one.answer})\n  teacher: {teacher(one, rng)}")


if __name__ == "__main__":
    main()
