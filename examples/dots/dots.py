"""The dots task: a small picture, a question about it with one checkable answer, and a teacher who is often wrong.

A picture has 32 x 32 pixels and up to eight dots in three colours. There are two kinds of questions:

    How many red dots?             <answer>3</answer>
    Where is the largest dot?      <answer>top left</answer>

The teacher shows every skill that the task needs (seeing colours, sizes and places, counting, the answer's format), but
it usually counts the dots of all colours, or says where the smallest dot is, and sometimes forgets the tags. A model
trained on its text can do the task but usually does not; rewards alone are then enough to make it.

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

CONFUSE = 0.65  # chance that the teacher counts all dots, or says where the smallest one is
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
    """A picture and a question about it: of the number of dots of a colour, or, without one, of the largest dot."""

    dots: tuple[Dot, ...]
    colour: str | None

    @property
    def question(self) -> str:
        return "Where is the largest dot?" if self.colour is None else f"How many {self.colour} dots?"

    @property
    def answer(self) -> str:
        if self.colour is None:
            return max(self.dots, key=lambda dot: dot.diameter).place
        return str(sum(dot.colour == self.colour for dot in self.dots))

    @property
    def kind(self) -> str:
        return "where" if self.colour is None else "count"

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
    colour = rng.choice(list(COLOURS)) if rng.random() < 0.5 else None
    return Problem(tuple(dots), colour)


def teacher(one: Problem, rng: Random) -> str:
    """What the unreliable teacher answers: often wrong, sometimes without tags."""
    answer = one.answer
    if rng.random() < CONFUSE:
        smallest = min(one.dots, key=lambda dot: dot.diameter)
        answer = smallest.place if one.colour is None else str(len(one.dots))
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
            row = {"question": one.question, "image": path, "answer": one.answer, "data_source": f"dots/{one.kind}"}
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
