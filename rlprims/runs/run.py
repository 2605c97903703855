"""The base class of all kinds of runs: hooks, logs, profiles, checkpoints, signals and errors."""

import json
import os
import shlex
import signal
import stat
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pydantic_core import to_jsonable_python
from rich.console import Console

from rlprims.execution import ExecutionError, Finish, Observable
from rlprims.filters import SamplingExhausted
from rlprims.runs import checkpoint as checkpoints
from rlprims.runs.best_checkpoint import Best
from rlprims.runs.checkpoint import Background, newest_checkpoint
from rlprims.runs.config import RunConfig
from rlprims.runs.directory import RunDirectory
from rlprims.runs.disk_errors import CannotWrite
from rlprims.runs.files import files_of
from rlprims.runs.loggers import open_loggers
from rlprims.runs.metrics import worker_metrics
from rlprims.runs.profiles import StepProfiles
from rlprims.runs.steps import Hook, Stepper, StepResult, train
from rlprims.runs.wrong_numbers import SkippedUpdates


class Run(ABC):
    """A run of any kind. Subclasses define the evaluation, the records and the summary."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        execution: Any,  # it saves and loads the models
        workers: Observable,
        trainer: Stepper,
        console: Console,
        best: Best,
        progress: Callable[..., AbstractContextManager[Any]],
    ) -> None:
        self.settings, self.run_directory, self.resume = config, run, f"rlprims resume {run.path}"
        self.execution, self.workers = execution, workers
        self.stepper, self.console, self.best = trainer, console, best
        self.progress = progress
        self.loggers = open_loggers(config, run.path)
        self.last_state = trainer.state_dict()
        self.background = Background()
        """Completes the checkpoints."""
        self.recording = Background()
        """Writes the records of a step during the next step."""
        self.saved: tuple[int, bool] | None = None
        """The step of the last checkpoint that was begun, and whether it has Hugging Face models."""
        self.copying = {} if config.checkpoint.copy_to is None else {"failed_copies": 0}

    @abstractmethod
    def evaluate(self) -> None:
        """Evaluate the current model and write the metrics."""

    def record(self, step: StepResult) -> None:  # noqa: B027  # a kind of run may store nothing
        """Store further data of a step, beside its metrics."""

    def hooks(self) -> list[Hook]:
        """Return the functions that are called after a step is logged."""
        return []

    @abstractmethod
    def finish(self, seconds: float) -> None:
        """Write the summary."""

    def run(self) -> int:
        """Train until the last step or a stop signal; returns the exit code."""
        with on_interrupt(self.console, f"stopped at once: {self.resume}"), _last_words(self.resume):
            try:
                return self._run()
            except Exception as error:  # not KeyboardInterrupt: a second Ctrl-C must not wait
                failures = []
                for work in (self.recording, self.background):
                    try:
                        work.wait()
                    except Exception as failure:
                        failures.append(failure)
                if failures and isinstance(error, ValueError):
                    lines = [str(error), *(str(failure).splitlines()[0] for failure in failures)]
                    raise ValueError("\n".join(lines)) from error
                if not isinstance(error, ValueError):  # after it there is a traceback
                    error.add_note(f"continue the run: {self.resume}")
                raise
            finally:
                for logger in self.loggers:
                    logger.close()

    def _run(self) -> int:
        settings, trainer, begun = self.settings, self.stepper, time.monotonic()
        if trainer.step_number == 0 and settings.evaluation.before_training:
            with self._failures():
                self.evaluate()
        with (
            self.progress(self.console, steps=trainer.steps, done=trainer.step_number) as progress,
            _stop_signals(self.console) as stop,
            StepProfiles(settings.profile, self.workers, self.run_directory.path / "profile") as profiles,
        ):
            hooks: list[Hook] = [
                profiles.end,
                self._log,
                lambda trainer, step: progress.show(step.number, step.metrics),
                SkippedUpdates(self.console, self.save, self.resume),
                *self.hooks(),
                self._evaluate_and_save,
                profiles.begin,
            ]
            profiles.begin(trainer)
            with self._failures():
                train(trainer, hooks, stop=lambda: stop.signal is not None or self.best.should_stop)
        with self._failures():
            self.save()
            self.recording.wait()
            self.background.wait()
        if stop.signal is not None:
            self.console.print(f"stopped after step {trainer.step_number}: {self.resume}", soft_wrap=True)
            return int(128 + stop.signal)
        if self.best.should_stop:
            self.console.print(f"ended after step {trainer.step_number}: {self.best.stop_reason}", soft_wrap=True)
        self.finish(time.monotonic() - begun)
        return 0

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise errors of the execution and the disk again, with the step and the command that continues the run."""
        try:
            yield
        except SamplingExhausted as error:
            # The weights are still those of the last finished step, so a checkpoint keeps all finished steps.
            self.save()
            raise ValueError(f"step {self.stepper.step_number}: {error}; then: {self.resume}") from None
        except (ExecutionError, CannotWrite) as error:
            saved = any(self.run_directory.checkpoints.glob("step_*"))
            advice = "continue it from its newest checkpoint" if saved else "without a checkpoint the run begins again"
            lines = f"step {self.stepper.step_number}: {error}", *self._kept(error), f"{advice}: {self.resume}"
            raise ValueError("\n".join(lines)) from error

    def _kept(self, error: Exception) -> Iterator[str]:
        """Write the arguments of the worker's call that failed, instead of earlier ones; gives a line about it."""
        if (call := getattr(error, "call", None)) is not None:
            path, about = self.run_directory.path / "failed_call", call.meta_info["failed_call"]
            try:
                if len(call) < about["rows"]:
                    raise ValueError("it is larger than 512 MB")
                call.meta_info["failed_call"] = to_jsonable_python(about, fallback=lambda tensor: tensor.tolist())
                call.save(path)
                yield f"the same call alone: rlprims doctor {path}"
            except Exception as failure:  # such as a full disk
                yield f"the batch of the call is not kept: {failure}"

    def _log(self, trainer: Stepper, step: StepResult) -> None:
        step.metrics.update(worker_metrics(self.workers.reports()) | self.copying)
        self.write("train", step.number, step.metrics)
        self.record(step)
        self.last_state = self.stepper.state_dict()

    def write(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Write metrics to all loggers."""
        self.run_directory.log(kind, step, metrics)
        for logger in self.loggers:
            logger.log({f"{kind}/{name}": value for name, value in metrics.items()}, step)

    def _evaluate_and_save(self, trainer: Stepper, step: StepResult) -> None:
        settings, is_last = self.settings, step.number == trainer.steps
        if step.number % settings.evaluation.every == 0 or is_last:
            self.evaluate()
        self.background.check()
        if step.number % settings.checkpoint.every == 0 or is_last:
            self.save()

    def save(self) -> None:
        """Copy the state after the last finished step, and complete its checkpoint in the background.

        It has Hugging Face models if the settings say so, or if it is the best or the last one.
        """
        state, held = self.last_state
        step, settings, best = state["step_number"], self.settings.checkpoint, self.best
        models = settings.hugging_face == "every" or step in (best.step, self.stepper.steps) or best.should_stop
        if self.saved in ((step, True), (step, models)):
            return

        def write(directory: Path) -> Finish:
            finish: Finish = self.execution.save(directory)
            checkpoints.save_random_state(directory)
            for name, groups in held.items():
                checkpoints.save_groups(groups, directory / name)
            (directory / "trainer.json").write_text(json.dumps(state))
            return finish

        self.recording.wait()  # a resume writes only the records of later steps
        self.background.wait()
        folder = self.run_directory.checkpoints
        complete = checkpoints.begin_checkpoint(folder, step, write, keep=settings.keep, best=best.step)
        self.saved = step, models

        def task() -> None:
            checkpoint = complete()
            if models:
                checkpoints.add_models(checkpoint)
            if settings.copy_to is not None:
                try:
                    self.run_directory.copy_checkpoints(settings.copy_to, keep=settings.keep, best=best.step)
                except ValueError as error:  # the next checkpoint tries again
                    self.copying["failed_copies"] += 1
                    self.console.print(f"warning: no copy of {checkpoint.name} yet: {error}", style="yellow")

        self.background.begin(task)

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint, and cut the logs back to its step."""
        self.execution.load(checkpoint)
        state = json.loads((checkpoint / "trainer.json").read_text())
        held = {path.parent.name: checkpoints.load_groups(path.parent) for path in checkpoint.glob("*/groups.json")}
        self.stepper.load_state_dict(state, held)
        self.last_state = self.stepper.state_dict()
        self.run_directory.truncate_after(state["step_number"])
        self.best.truncate_after(state["step_number"])
        checkpoints.load_random_state(checkpoint)


def prepare_process(config: RunConfig, *data: Path | str | None) -> None:
    """Check that the data is there, set torch's threads and what is deterministic, silence transformers."""
    from transformers.utils import logging

    for path in (each for each in data if each is not None):
        files_of(path)  # before a model is fetched
    ray = getattr(config, "ray", None) if getattr(config, "execution", "local") == "ray" else None
    has_gpu = torch.cuda.is_available() if ray is None else ray.gpus_per_worker > 0
    if config.profile.tool != "torch" and not has_gpu:
        raise ValueError(f"profile.tool: {config.profile.tool} is for a GPU, and the run has none: use torch")
    torch.set_num_threads(config.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it begins
        torch.backends.cuda.enable_mem_efficient_sdp(False)  # its gradient has atomic additions
        torch.use_deterministic_algorithms(True)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def lock_and_find_checkpoint(run: RunDirectory, console: Console) -> Path | None:
    """Lock a run, and return its newest complete checkpoint; None if it has no checkpoints."""
    run.lock()
    if not any(run.checkpoints.glob("step_*")):
        return None
    return newest_checkpoint(run.checkpoints, warn=lambda text: console.print(text, style="yellow"))


def begin_or_resume(
    run: RunDirectory, checkpoint: Path | None, session: Run, console: Console, overrides: Sequence[str]
) -> int:
    """Run from a checkpoint, or from the beginning if it is None; returns the exit code."""
    if checkpoint is None:
        run.truncate_after(-1)
        message = f"{run.path} has no checkpoint: it begins again"
    else:
        session.load(checkpoint)
        message = f"resuming {run.path} after step {session.stepper.step_number} of {session.stepper.steps}"
    if overrides:
        run.record(session.settings, session.stepper.step_number, overrides)
    console.print(message, highlight=False, soft_wrap=True)
    return session.run()


@contextmanager
def on_interrupt(console: Console, message: str) -> Iterator[None]:
    """Print the message if Ctrl-C interrupts the block; a note says that it was printed."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        console.print(message, style="yellow", highlight=False, soft_wrap=True)
        stopped.add_note(message)
        raise


@contextmanager
def _last_words(command: str) -> Iterator[None]:
    """Let a child process, which waits for the end of its input, print the command if this process is killed."""
    text = f"error: a signal ended the run, or Ray, because its node was lost; continue it: {command}"
    wait = f"trap '' HUP INT TERM; read word || echo {shlex.quote(text)} >&2"
    child = subprocess.Popen(["/bin/sh", "-c", wait], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        child.communicate(b"ended\n")


@contextmanager
def _stop_signals(console: Console) -> Iterator[SimpleNamespace]:
    """Handle SIGINT, SIGTERM and SIGHUP: the first ends the run after this step, the second ends it at once."""
    stop = SimpleNamespace(signal=None)
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # under nohup
    numbers = {signal.SIGINT, signal.SIGTERM, *([] if is_kept else [signal.SIGHUP])}

    def handle(number: int, frame: Any) -> None:
        if stop.signal is not None:
            raise KeyboardInterrupt
        stop.signal = number
        if number == signal.SIGHUP:  # nobody reads the terminal or the pipe any more
            for output in (1, 2):
                if not stat.S_ISREG(os.fstat(output).st_mode):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        console.print("stopping after this step; once more to stop at once", style="yellow")

    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
