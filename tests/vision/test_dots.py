"""The task of examples/dots: its answers are what the pictures show, and a small model learns it by DAPO."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from tests.vision.made import ROOT

from dots import CONFUSE, NO_FORMAT, problem, teacher, write_rows  # isort: skip - of examples/dots, see tests.vision.made
from environment import Looks  # isort: skip

NAMES = {"top left": (0, 0), "top right": (0, 1), "bottom left": (1, 0), "bottom right": (1, 1)}


def seen(picture: Image.Image, question: str) -> str:
    """The answer by the pixels alone."""
    pixels = np.asarray(picture.convert("RGB")).astype(int)
    inked = (pixels < 250).any(-1).reshape(4, 8, 4, 8).sum((1, 3))  # of each cell
    if question == "How many dots?":
        return str(int((inked > 0).sum()))
    row, column = np.unravel_index(inked.argmax(), inked.shape)
    if question == "Where is the largest dot?":
        return next(name for name, place in NAMES.items() if place == (row // 2, column // 2))
    strongest = pixels[8 * row : 8 * row + 8, 8 * column : 8 * column + 8].reshape(-1, 3).min(0).argmax()
    return ["red", "green", "blue"][strongest]


def test_answers_are_what_the_pictures_show(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in write_rows(tmp_path, "few", 200, seed=3).read_text().splitlines()]
    for row in rows:
        assert seen(Image.open(tmp_path / row["image"]), row["question"]) == row["answer"]
    assert min(Counter(row["question"] for row in rows).values()) > 40
    again = write_rows(tmp_path / "again", "few", 200, seed=3)
    assert again.read_bytes() == (tmp_path / "few.jsonl").read_bytes()
    assert (again.parent / rows[9]["image"]).read_bytes() == (tmp_path / rows[9]["image"]).read_bytes()


def test_the_teacher_is_right_as_often_as_its_constants_say() -> None:
    rng = Random(0)
    problems = [problem(rng) for _ in range(4000)]
    said = [(one, teacher(one, rng)) for one in problems if one.answer != one.confused]
    right = sum(text == f"<answer>{one.answer}</answer>" for one, text in said) / len(said)
    assert right == pytest.approx((1 - CONFUSE) * (1 - NO_FORMAT), abs=0.03)
    careful = [(one, teacher(one, rng, confuse=0.0)) for one, _ in said]
    assert all(text in (one.answer, f"<answer>{one.answer}</answer>") for one, text in careful)


@pytest.mark.slow
@pytest.mark.release
def test_dapo_raises_a_model_from_a_third_to_four_fifths(tmp_path: Path) -> None:
    base, data, run = (tmp_path / name for name in ("base", "data", "run"))
    script = ROOT / "examples" / "dots" / "warm_up.py"
    subprocess.run([sys.executable, str(script), "--out", str(base), "--data", str(data)], cwd=tmp_path, check=True)
    files = [f"data.{split}={data / split}.jsonl" for split in ("train", "eval")]
    command = ["train", str(ROOT / "examples" / "dots" / "dapo.yaml"), f"run_dir={run}", f"model.path={base}", *files]
    subprocess.run([sys.executable, "-m", "rlprims", *command], cwd=ROOT, check=True)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["before"]["sampled/acc"] < 0.45
    assert summary["after"]["sampled/acc"] > 0.8
    assert summary["skipped_updates"] == summary["failed_groups"] == 0


def test_the_second_look_shows_what_the_first_hides(tmp_path: Path) -> None:
    row = json.loads(write_rows(tmp_path, "few", 1, seed=3).read_text())
    whole = (tmp_path / row["image"]).read_bytes()
    first, second = Looks("How many dots?", "9", (whole,)), Looks("How many dots?", row["answer"], (whole,))
    hidden = np.asarray(first.reset()[0]["content"][0]["image"])
    seen_ = np.asarray(Image.open(tmp_path / row["image"]).convert("RGB"))
    assert (hidden[:8] == 255).all()
    assert (hidden[8:] == seen_[8:]).all()
    said = {"role": "assistant", "content": f"<answer>{row['answer']}</answer>"}
    again = first.step(said)
    assert (again.messages[0]["content"][0]["image"], again.done) == (whole, False)
    assert (last := first.step(said)).done
    assert last.reward == 0.0
    assert (second.step(said).reward, second.looks) == (1.0, 1)
