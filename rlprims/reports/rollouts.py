"""The recorded responses of a run: as rows, in the terminal, or as an HTML page."""

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.style import Style
from rich.text import Text

from rlprims.reports._rollout_page import write_page
from rlprims.reports._visible import visible
from rlprims.runs.records import RecordedRow, by_group, read_rollouts

__all__ = ["RecordedRow", "print_rollouts", "read_rollouts", "write_page"]

_GREY, _GREEN, _RED = (128, 128, 128), (0, 165, 80), (225, 50, 45)  # legible on black and on white


def print_rollouts(
    run: Path, *, step: int | None = None, count: int = 8, source: str | None = None, console: Console | None = None
) -> None:
    """Print the samples of a step by group: the prompt, and the responses with tokens in the colour of their advantage.

    Tokens with a positive advantage are green, those with a negative one red; the colour is stronger for a larger
    advantage, relative to the largest of the step. Rows that were not trained on are dim, and come last.

    Args:
        run: a run directory.
        step: a recorded step; by default the last one.
        count: the largest number of responses.
        source: only prompts of this ``data_source``.
        console: where to print; standard output by default.

    Raises:
        ValueError: nothing is recorded for this step or source, a line is damaged, or ``count`` is below 1.
    """
    if count < 1:
        raise ValueError(f"count={count}: expected at least 1")
    rows = read_rollouts(run, step)
    largest = max((abs(a) for row in rows for a in row.advantages or [] if a is not None), default=0.0)
    sources = sorted({row.data_source for row in rows})
    rows = [row for row in rows if source in (None, row.data_source)]
    if not rows:
        raise ValueError(f"no rollout from {source!r} in this step; its sources are {', '.join(sources) or 'none'}")
    console = console or Console()
    groups = by_group(rows)
    statuses = Counter(row.outcome or "no status recorded" for row in rows)
    counts = ", ".join(f"{number} {visible(status)}" for status, number in statuses.most_common())
    console.print(Text(f"step {rows[0].step}: {len(groups)} groups, {len(rows)} responses ({counts})"))
    left = count
    for group in sorted(groups, key=lambda group: all(row.is_left_out for row in group)):
        if left > 0:
            _print_group(console, group, largest, count=left)
            left -= len(group)
    if len(rows) > count:
        console.print(Text(f"{len(rows) - count} more responses in this step", style="dim"))


def _print_group(console: Console, group: Sequence[RecordedRow], largest: float, *, count: int) -> None:
    first = group[0]
    parts = [f"group {first.group}", first.data_source]
    parts += [] if first.baseline_score is None else [f"greedy score {first.baseline_score:g}"]
    console.print(Rule(Text(visible(" · ".join(filter(None, parts))), style="bold"), align="left", style="dim"))
    console.print(Text(visible(first.prompt)))
    if first.answer:
        console.print(Text(f"answer: {visible(first.answer)}", style="bold"))
    for row in group[:count]:
        console.print(_heading(row))
        console.print(Padding(_tokens(row, largest), (0, 0, 0, 2)))
    if len(group) > count:
        console.print(Text(f"▸ {len(group) - count} more in this group", style="dim"))
    console.print()


def _heading(row: RecordedRow) -> Text:
    parts = [] if row.score is None else [f"score {row.score + 0.0:g}"]
    if row.shaped_score is not None and row.shaped_score != row.score:
        parts.append(f"shaped {row.shaped_score:g}")
    numbers = [a for a in row.advantages or [] if a is not None]
    if numbers:
        low, high = f"{min(numbers):+.2f}", f"{max(numbers):+.2f}"
        parts.append(f"advantage {low}" if low == high else f"advantage {low} to {high}")
    for key, value in row.columns.items():
        if value not in (None, ""):
            parts.append(f"{key} {value + 0.0:g}" if isinstance(value, int | float) else f"{key} {value}")
    if row.turn_rewards:
        parts.append(f"rewards by turn {', '.join(f'{reward:g}' for reward in row.turn_rewards.values())}")
    parts += [f"{len(row.tokens)} tokens", f"ended: {row.ended}" if row.ended not in ("", "stop") else "", row.outcome]
    text = Text("▸ ", style="dim" if row.is_left_out else "")
    return text.append(visible(" · ".join(filter(None, parts))), style="dim" if row.is_left_out else "bold")


def _tokens(row: RecordedRow, largest: float) -> Text:
    text = Text()
    for token, advantage, read in zip_longest(row.tokens, row.advantages or [], row.observed):
        style = Style(dim=True, italic=bool(read)) if row.is_left_out or read else _colour(advantage, largest)
        text.append(visible(token).replace("\n", "↵\n"), style=style)
    return text


def _colour(advantage: float | None, largest: float) -> Style:
    if not advantage or not largest:
        return Style()
    size = 0.35 + 0.65 * abs(advantage) / largest
    full = _GREEN if advantage > 0 else _RED
    red, green, blue = (round(grey + size * (end - grey)) for grey, end in zip(_GREY, full, strict=True))
    return Style(color=f"rgb({red},{green},{blue})")
