"""A run from its config to its summary: builds the parts, hangs the hooks, saves, and leaves cleanly."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from rlprims.execution import Execution, ExecutionError
from rlprims.filters import SamplingExhausted
from rlprims.trainer.checkpoint import (
    load_groups,
    load_random_state,
    newest_checkpoint,
    save_checkpoint,
    save_groups,
    save_random_state,
)
from rlprims.trainer.config import Config
from rlprims.trainer.curves import draw_curves, read_metrics, summary_table
from rlprims.trainer.data import Examples, load_examples
from rlprims.trainer.episodes import Player
from rlprims.trainer.evaluation import evaluate
from rlprims.trainer.examine import examine
from rlprims.trainer.first_look import filter_note
from rlprims.trainer.loggers import check_loggers, open_loggers
from rlprims.trainer.loop import Hook, Step, Trainer, train
from rlprims.trainer.measures import worker_metrics
from rlprims.trainer.profile import StepProfiles
from rlprims.trainer.progress import ProgressHook
from rlprims.trainer.replay import Replay
from rlprims.trainer.rewarding import checks
from rlprims.trainer.run_directory import RunDirectory
from rlprims.trainer.writing import CannotWrite, writing


class Parts(NamedTuple):
    """What a run is made of, checked, in the order in which mistakes are cheapest to find."""

    tokenizer: Any
    training: Examples
    evaluation: Examples | None
    execution: Execution


def build(config: Config, console: Console, *, weights: str | None = None) -> Parts:
    """Tokenizer and data first, then the models; ``weights`` in the place of ``model.path``."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    torch.set_num_threads(config.threads)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    path = weights or config.model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        window = getattr(AutoConfig.from_pretrained(path), "max_position_embeddings", 2**31)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: cannot load {path!r}: {str(error).splitlines()[0]}") from None
    room = window - config.sampling.max_new_tokens
    limit = min(room, config.data.max_prompt_length or room)
    if limit < 1:
        raise ValueError(
            f"sampling.max_new_tokens={config.sampling.max_new_tokens} leaves no room for a prompt in the model's "
            f"window of {window} tokens"
        )
    training = _load(config.data.train, config, tokenizer, limit, console)
    evaluation = _load(config.data.eval, config, tokenizer, limit, console) if config.data.eval else None
    execution = _execution(config, path, tokenizer)
    if config.replay is not None:
        execution = Replay(execution, config.replay, seed=config.seed, scores=config.replay_scores)
    return Parts(tokenizer, training, evaluation, execution)


def _execution(config: Config, path: str, tokenizer: Any) -> Execution:
    upc = config.algorithm.updates_per_batch
    model = config.model.model_copy(update={"path": path})
    options: dict[str, Any] = {
        "algorithm": config.algorithm,
        "tokenizer": tokenizer,
        "temperature": config.sampling.temperature,
        "updates": max(1, config.steps - config.critic.warmup_steps) * upc,
        "critic_optimizer": config.critic.optimizer,
        "critic_updates": config.steps * upc,
    }
    if config.execution == "local":
        from rlprims.execution.local import LocalExecution

        return LocalExecution(model, config.optimizer, **options)
    try:
        from rlprims.execution.ray import RayExecution
    except ModuleNotFoundError as error:
        raise ValueError(f"execution: ray needs {error.name}: rlprims doctor says how to install it") from None
    try:
        return RayExecution(config.ray, model, config.optimizer, **options)
    except ExecutionError as error:
        raise ValueError(f"execution: ray did not start: {error}") from None


def _load(path: Path, config: Config, tokenizer: Any, limit: int, console: Console) -> Examples:
    examples = load_examples(path, config.data, tokenizer, max_prompt_length=limit, check=checks(config))
    for count, what in ((examples.filtered, "left out"), (examples.truncated, "cut")):
        if count:
            console.print(f"{path}: {count} prompts longer than {limit} tokens were {what}", style="yellow")
    return examples


def evaluate_parts(config: Config, parts: Parts, console: Console) -> dict[str, float]:
    """The evaluation split's metrics; some of its responses are printed, if the config says so."""
    if parts.evaluation is None:
        raise ValueError("data.eval is not set: write the path of a JSON lines file")
    return evaluate(
        parts.execution,
        parts.tokenizer,
        parts.evaluation.rows[: config.evaluation.limit],
        verifier=config.asked_in_evaluation,
        scoring=config.scoring,
        sampling=config.sampling,
        samples=config.evaluation.samples,
        seed=config.seed,
        player=Player.of(config, parts.execution, parts.tokenizer),
        look=lambda rows: examine(console, "evaluation", [rows], config.evaluation.num_examine),
    )


def start(config: Config, console: Console) -> int:
    """A new run; the exit code."""
    for warning in config.warnings():
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    check_loggers(config)
    parts = build(config, console)
    with closing(parts.execution):
        if note := filter_note(config, parts.training.rows[0]):
            console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
        return _Session(config, RunDirectory.create(config), parts, console).run()


def resume(run: RunDirectory, config: Config, console: Console) -> int:
    """Continue from the newest whole checkpoint as if nothing had happened; the exit code."""
    check_loggers(config)
    run.lock()
    checkpoint = newest_checkpoint(run.checkpoints, warn=lambda text: console.print(text, style="yellow"))
    parts = build(config, console)
    with closing(parts.execution):
        session = _Session(config, run, parts, console)
        session.load(checkpoint)
        done = session.trainer.step_number
        console.print(f"resuming {run.path} after step {done} of {config.steps}", highlight=False, soft_wrap=True)
        return session.run()


class _Session:
    def __init__(self, config: Config, run: RunDirectory, parts: Parts, console: Console) -> None:
        self.config, self.run_directory, self.parts, self.console = config, run, parts, console
        self.trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
        self.loggers = open_loggers(config, run.path)
        self.boundary = self.trainer.state_dict()

    def run(self) -> int:
        config, trainer, begun = self.config, self.trainer, time.monotonic()
        if trainer.step_number == 0 and config.evaluation.before_training:
            self._evaluate()
        with (
            ProgressHook(self.console, steps=config.steps, done=trainer.step_number) as progress,
            _stop_signals(self.console) as stop,
            StepProfiles(config.profile, self.parts.execution, self.run_directory.path / "profile") as profiles,
        ):
            hooks: list[Hook] = [profiles.end, self._log, progress, self._evaluate_sometimes, self._save_sometimes]
            hooks.append(profiles.begin)
            profiles.begin(trainer)
            try:
                train(trainer, hooks, stop=stop.requested)
            except SamplingExhausted as error:
                # The weights are those of the last finished step, so nothing that was learned is lost.
                self._save()
                raise ValueError(
                    f"step {trainer.step_number}: {error}; then: rlprims resume {self.run_directory.path}"
                ) from None
            except (ExecutionError, CannotWrite) as error:
                raise ValueError(
                    f"step {trainer.step_number}: {error}\nthe run goes on from its newest checkpoint by: "
                    f"rlprims resume {self.run_directory.path}"
                ) from None
        if stop.signal is not None:
            self._save()
            told = f"stopped after step {trainer.step_number}: rlprims resume {self.run_directory.path}"
            self.console.print(told, soft_wrap=True)
            return 128 + stop.signal
        self._finish(time.monotonic() - begun)
        return 0

    def _log(self, trainer: Trainer, step: Step) -> None:
        step.metrics.update(worker_metrics(self.parts.execution.reports()))
        self._write("train", step.number, step.metrics)
        sampled = [step.batch, *(rows for rows, _ in step.dropped)]
        examine(self.console, f"step {step.number}", sampled, self.config.num_examine)
        if self.config.record_rollouts:
            self.run_directory.write_rollouts(step, self.parts.tokenizer)
        self.boundary = self.trainer.state_dict()

    def _write(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        self.run_directory.log(kind, step, metrics)
        for log in self.loggers:
            log(step, {f"{kind}/{name}": value for name, value in metrics.items()})

    def _evaluate_sometimes(self, trainer: Trainer, step: Step) -> None:
        if step.number % self.config.evaluation.every == 0 or step.number == self.config.steps:
            self._evaluate()

    def _evaluate(self) -> None:
        if self.parts.evaluation is None:
            return
        metrics = evaluate_parts(self.config, self.parts, self.console)
        metrics |= worker_metrics(self.parts.execution.reports())
        self._write(
            "eval", self.trainer.step_number, {**metrics, "generated_tokens_total": self.trainer.generated_tokens}
        )
        unscored = metrics["sampled/unscored"]
        self.console.print(
            f"step {self.trainer.step_number}: accuracy {metrics['sampled/acc']:.3f} sampled, "
            f"{metrics['greedy/acc']:.3f} greedy, length {metrics['sampled/length']:.1f}"
            + (f"; {unscored:.0%} of the responses could not be scored and count as wrong" if unscored else ""),
            highlight=False,
            soft_wrap=True,
        )

    def _save_sometimes(self, trainer: Trainer, step: Step) -> None:
        if step.number % self.config.checkpoint.every == 0 or step.number == self.config.steps:
            self._save()

    def _save(self) -> None:
        """The state after the last finished step."""
        state, held = self.boundary

        def write(directory: Path) -> None:
            self.parts.execution.save(directory)
            save_random_state(directory)
            for name, groups in held.items():
                save_groups(groups, directory / name)
            (directory / "trainer.json").write_text(json.dumps(state))

        save_checkpoint(self.run_directory.checkpoints, state["step_number"], write, keep=self.config.checkpoint.keep)

    def load(self, checkpoint: Path) -> None:
        self.parts.execution.load(checkpoint)
        state = json.loads((checkpoint / "trainer.json").read_text())
        held = {path.parent.name: load_groups(path.parent) for path in checkpoint.glob("*/groups.json")}
        self.trainer.load_state_dict(state, held)
        self.boundary = self.trainer.state_dict()
        self.run_directory.forget_after(state["step_number"])
        load_random_state(checkpoint)

    def _finish(self, seconds: float) -> None:
        run = self.run_directory
        metrics = read_metrics(run.path)
        lines = [line for line in metrics if line["kind"] == "eval"]
        training = [line for line in metrics if line["kind"] == "train"]
        run.write_json(
            "summary.json",
            {
                "steps": self.trainer.step_number,
                "seconds": round(seconds, 1),
                "generated_tokens": self.trainer.generated_tokens,
                "skipped_updates": sum(line["skipped_updates"] for line in training),
                "failed_groups": sum(line["groups_failed"] for line in training),
                "before": lines[0] if lines else None,
                "after": lines[-1] if lines else None,
            },
        )
        with writing(run.path / "curves.png"):
            plot = draw_curves([run.path], run.path / "curves.png")
        self.console.print(summary_table([run.path]))
        self.console.print(f"plot: {plot}\nsamples: rlprims rollouts {run.path}", highlight=False, soft_wrap=True)


class _Stop:
    signal: int | None = None

    def requested(self) -> bool:
        return self.signal is not None


@contextmanager
def _stop_signals(console: Console) -> Iterator[_Stop]:
    """The first SIGINT or SIGTERM ends the run after the step; a second one at once."""
    stop = _Stop()

    def handle(number: int, frame: Any) -> None:
        if stop.signal is not None:
            raise KeyboardInterrupt
        stop.signal = number
        console.print("stopping after this step; once more to stop at once", style="yellow")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
