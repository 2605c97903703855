"""The arithmetic task: every question once, in one of the two files, with its answer."""

import json
import re
import subprocess
import sys
from pathlib import Path

from rlprims.rewards.verifiers import gsm8k

ROOT = Path(__file__).parents[2]


def test_every_pair_is_in_one_file_with_the_right_answer(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "smollm" / "arithmetic.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    asked = {}
    for split in ("train", "eval"):
        rows = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        found = [re.fullmatch(r"What is (\d) ([+*]) (\d)\?", row["question"]) for row in rows]
        asked[split] = {(match[2], *sorted(map(int, match.group(1, 3)))) for match in found if match}
        for row in rows:
            sign = row["question"].split()[3]
            a, b = (int(digit) for digit in re.findall(r"\d", row["question"]))
            right = a + b if sign == "+" else a * b
            assert gsm8k(f"{a} {sign} {b} = {right}", row["answer"])["acc"] == 1.0
    assert not asked["train"] & asked["eval"]
    assert len(asked["train"] | asked["eval"]) == 45 + 36
    assert len(asked["eval"]) == 15 + 12
