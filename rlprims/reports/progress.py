"""What a run prints while it trains: a progress line, and samples."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.text import Text

from rlprims._json import beside
from rlprims.data_proto import DataProto
from rlprims.reports._visible import visible

_SHOWN: dict[str, str] = beside(__file__, "_metrics.json")["progress"]
"""Metrics in the progress line, the most important first."""

_BAR, _WIDE = 20, 110
"""The width of the bar, and the least width of a terminal in which the bar is shown beside the numbers."""

_INTERNAL = {"sample_id", "group", "group_ids", "trajectory_ids", "ended", "valid_rows", "rm_scores"}
"""Columns that are not printed with a sample."""


def fitting(parts: Iterable[str], width: int) -> str:
    """The first of the parts, as many as fit into ``width`` columns.

    >>> fitting(["score 0.95", "len 28", "H 0.33"], 20)
    'score 0.95  len 28'
    """
    shown = ""
    for part in parts:
        longer = f"{shown}  {part}" if shown else part
        if len(longer) > width:
            break
        shown = longer
    return shown


class ProgressLine:
    """On a terminal one line, with the metrics that fit; in a file or pipe a line for every tenth of the run."""

    def __init__(self, console: Console, *, steps: int, done: int) -> None:
        self.console, self.steps = console, steps
        self.progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            *([BarColumn(bar_width=_BAR)] if console.width >= _WIDE else []),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[metrics]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("step", total=steps, completed=done, metrics="")

    def __enter__(self) -> "ProgressLine":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [text.format(metrics[name]) for name, text in _SHOWN.items() if name in metrics]
        others = [len(f"step {self.steps}/{self.steps}"), len("0:00:00")]
        others += [_BAR] if self.console.width >= _WIDE else []
        width = self.console.width - sum(other + 1 for other in others)  # a space after each column
        self.progress.update(self.task, completed=step, metrics=fitting(parts, width))
        if not self.console.is_terminal and step % max(1, self.steps // 10) == 0:
            line = "  ".join([f"step {step}/{self.steps}", *parts])
            self.console.print(line, highlight=False, soft_wrap=True)


def print_samples(console: Console, title: str, batches: Iterable[DataProto], count: int) -> None:
    """Print the first ``count`` samples of each data source: the prompt, the response, the answer and all scores."""
    seen: Counter[str] = Counter()
    for batch in batches if count else ():
        numbers = [name for name, column in batch.batch.items() if column.dim() == 1 and name not in _INTERNAL]
        for i, source in enumerate(batch["data_source"]):
            if seen[source] == count:
                continue
            seen[source] += 1
            values = {name: float(batch[name][i]) for name in numbers}
            scores = "  ".join(f"{name} {value:g}" for name, value in values.items() if not math.isnan(value))
            failure = batch["failure"][i]
            console.print(Rule(Text(visible(f"{title} · {source}"), style="bold"), align="left", style="dim"))
            console.print(Text(visible(batch["prompt"][i]), style="dim"))
            console.print(Text(visible(batch["response"][i])))
            console.print(Text(visible(f"answer: {batch['answer'][i]}"), style="dim"))
            console.print(Text(visible(f"{scores}  {failure}" if failure else scores), style="bold"))
