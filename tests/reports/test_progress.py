"""The line that is seen while a run goes on, as wide as the terminal."""

import io
import re
from typing import cast

import pytest
from rich.console import Console

from rlprims.reports.progress import ProgressLine

METRICS = {
    "score": 0.95,
    "length": 28.0,
    "entropy": 0.33,
    "clip_fraction_high": 0.001,
    "filter_yield": 0.8,
    "time/tokens_per_second": 1234.0,
}


def shown(console: Console, *, steps: int, at: list[int]) -> list[str]:
    """What is written, without the terminal's control sequences; a line each time that it is drawn."""
    with ProgressLine(console, steps=steps, done=0) as line:
        for number in at:
            line.show(number, METRICS)
    text = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", cast(io.StringIO, console.file).getvalue())
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.mark.parametrize(
    ("width", "last", "bar"),
    [(120, "1234 tok/s", True), (80, "yield 80%", False), (60, "clip 0.001", False), (40, "len 28", False)],
)
def test_the_line_has_the_numbers_that_fit_and_cuts_none(width: int, last: str, bar: bool) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    lines = shown(console, steps=120, at=[1, 37])
    assert all(len(line) <= width for line in lines)
    assert lines[-1].startswith("step 37/120 ")
    assert ("━" in lines[-1]) == bar
    assert "…" not in lines[-1]
    assert "score 0.95" in lines[-1]
    assert lines[-1].endswith(last)


def test_in_a_pipe_it_is_a_whole_line_for_every_tenth_of_the_run() -> None:
    lines = shown(Console(file=io.StringIO(), width=40), steps=20, at=list(range(1, 21)))
    assert [line.split()[1] for line in lines] == [f"{step}/20" for step in range(2, 21, 2)]
    assert all(line.endswith("yield 80%  1234 tok/s") for line in lines)
