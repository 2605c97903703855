"""The progress bar of a run, or lines where there is no terminal."""

from collections.abc import Iterable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from rlprims.trainer.loop import Step, Stepper

_SHOWN = {
    "score": "score {:.2f}",
    "nll": "nll {:.3f}",
    "pairs/loss": "loss {:.3f}",
    "pairs/accuracy": "right {:.0%}",
    "pairs/margin": "margin {:.2f}",
    "length": "len {:.0f}",
    "entropy": "H {:.2f}",
    "clip_fraction_high": "clip {:.3f}",
    "filter_yield": "yield {:.0%}",
    "time/tokens_per_second": "{:.0f} tok/s",
}


_BAR, _WIDE = 20, 110
"""Columns of the bar, and of a terminal that is wide enough for the bar beside the numbers."""


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


class ProgressHook:
    """One line on a terminal, of the numbers that fit; elsewhere a line for every tenth of the run."""

    def __init__(self, console: Console, *, steps: int, done: int) -> None:
        self.console = console
        self.steps = steps
        self.progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            *([BarColumn(bar_width=_BAR)] if console.width >= _WIDE else []),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[metrics]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("step", total=steps, completed=done, metrics="")

    def __enter__(self) -> "ProgressHook":
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def __call__(self, trainer: Stepper, step: Step) -> None:
        parts = [shown.format(step.metrics[name]) for name, shown in _SHOWN.items() if name in step.metrics]
        self.progress.update(self.task, completed=step.number, metrics=fitting(parts, self._width_left()))
        if not self.console.is_terminal and step.number % max(1, self.steps // 10) == 0:
            line = "  ".join([f"step {step.number}/{self.steps}", *parts])
            self.console.print(line, highlight=False, soft_wrap=True)

    def _width_left(self) -> int:
        """The width of the terminal minus the other columns, with a space after each."""
        others = [len(f"step {self.steps}/{self.steps}"), len("0:00:00")]
        others += [_BAR] if self.console.width >= _WIDE else []
        return self.console.width - sum(width + 1 for width in others)
