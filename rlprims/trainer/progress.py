"""What a person sees while a run goes on."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlprims.trainer.loop import Step, Trainer

_SHOWN = {
    "score": "score {:.2f}",
    "length": "len {:.0f}",
    "entropy": "H {:.2f}",
    "clip_fraction_high": "clip {:.3f}",
    "filter_yield": "yield {:.0%}",
    "time/tokens_per_second": "{:.0f} tok/s",
}


class ProgressHook:
    """A bar on a terminal; elsewhere a line for every tenth of the run."""

    def __init__(self, console: Console, *, steps: int, done: int) -> None:
        self.console = console
        self.steps = steps
        self.progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
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

    def __call__(self, trainer: Trainer, step: Step) -> None:
        metrics = "  ".join(shown.format(step.metrics[name]) for name, shown in _SHOWN.items() if name in step.metrics)
        self.progress.update(self.task, completed=step.number, metrics=metrics)
        if not self.console.is_terminal and step.number % max(1, self.steps // 10) == 0:
            self.console.print(f"step {step.number}/{self.steps}  {metrics}", highlight=False)
