"""A run from its config to its summary."""

from collections.abc import Callable, Sequence
from contextlib import closing
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from rlprims.execution import ExecutionError, Models, Observable, RunNeeds
from rlprims.reports.curves import draw_curves, read_metrics, summary_table
from rlprims.reports.progress import ProgressLine, print_samples
from rlprims.runs.best_checkpoint import Best
from rlprims.runs.directory import RunDirectory
from rlprims.runs.disk_errors import writing
from rlprims.runs.end_tokens import load_tokenizer
from rlprims.runs.loggers import check_loggers
from rlprims.runs.metrics import worker_metrics
from rlprims.runs.rows import have_images, report, with_time
from rlprims.runs.run import Run, begin_or_resume, lock_and_find_checkpoint, on_interrupt, prepare_process
from rlprims.runs.steps import Hook, StepResult
from rlprims.trainer.config import Config
from rlprims.trainer.data import Examples, load_examples
from rlprims.trainer.early_warnings import AuditedStep, EqualScores, filter_note
from rlprims.trainer.evaluation import SEED_OFFSET, evaluate
from rlprims.trainer.loop import Trainer
from rlprims.trainer.mismatch import Bounds
from rlprims.trainer.scoring.rewards import answer_check, verify
from rlprims.trainer.scoring.settings import RewardConfig
from rlprims.trainer.sources import sources_of
from rlprims.trainer.sources.replay import Replay


class Parts(NamedTuple):
    """The checked parts of a run. They are built in this order so that mistakes are found early."""

    tokenizer: Any
    training: Examples
    evaluation: dict[str, Examples]
    """By the names of :meth:`Config.evaluations`."""
    execution: Models
    workers: Observable
    """The processes that run the models, also if the execution replays a recording."""


def build(config: Config, console: Console, *, weights: str | None = None) -> Parts:
    """Build the parts of a run. ``weights`` replaces ``model.path``."""
    asked = config.evaluations()
    prepare_process(config, config.data.train, *(one.file for one in asked.values()))
    path = weights or config.model.path
    tokenizer, ends, window = load_tokenizer(path, console, config.model)
    longest = window - config.sampling.max_new_tokens
    limit = min(longest, config.data.max_prompt_length or longest)
    if limit < 1:
        raise ValueError(
            f"sampling.max_new_tokens={config.sampling.max_new_tokens}: expected fewer tokens than the model's window "
            f"of {window}, so that a prompt fits into it"
        )
    how = (config, tokenizer, limit, console)
    training = _load(config.data.train, config.verifiers(), *how)
    evaluation = {name: _load(one.file, config.verifiers(one.verifier)[:1], *how) for name, one in asked.items()}
    images = have_images(config.model, training, *evaluation.values())
    backend = _backend(config, path, tokenizer, ends, console, images)
    execution = backend
    if config.replay is not None:
        known: dict[str, Any] = {"scores": config.replay_scores, "tokenizer": tokenizer, "end_ids": ends}
        execution = Replay(backend, config.replay, seed=config.seed, **known)  # it has every attribute of the backend
    return Parts(tokenizer, training, evaluation, execution, backend)


def _backend(config: Config, path: str, tokenizer: Any, ends: list[int], console: Console, images: bool) -> Any:
    from rlprims.execution.hf._rules import rules_of  # here, because it loads transformers

    samplings = (config.sampling, *(one.sampling.over(config.sampling) for one in config.evaluations().values()))
    for each in samplings:
        rules_of(each, tokenizer, ends, len(tokenizer))  # an error before anything starts
    upc = config.algorithm.updates_per_batch
    model = config.model.model_copy(update={"path": path})
    run: RunNeeds = {
        "algorithm": config.algorithm,
        "temperature": config.sampling.temperature,
        "sampling": samplings,
        "updates": max(1, config.steps - config.critic.warmup_steps) * upc,
        "critic_optimizer": config.critic.optimizer,
        "critic_updates": config.steps * upc * config.critic.updates_per_policy_update,
        "critic_freeze": config.critic.freeze,
        "images": images,
    }
    if config.execution == "local":
        from rlprims.execution.local import LocalExecution

        return LocalExecution(model, config.optimizer, tokenizer=tokenizer, **run)
    try:
        from rlprims.execution.ray import RayExecution
    except ModuleNotFoundError as error:
        raise ValueError(f"execution: ray needs {error.name}: rlprims doctor says how to install it") from None

    say = partial(console.print, style="dim", highlight=False, soft_wrap=True)
    try:
        return RayExecution(config.ray, model, config.optimizer, tokenizer=tokenizer, say=say, **run)
    except ExecutionError as error:
        raise ValueError(f"execution: ray did not start: {error}") from error


def _load(
    path: Path | str, verifiers: list[RewardConfig], config: Config, tokenizer: Any, limit: int, console: Console
) -> Examples:
    examples = load_examples(path, config.data, tokenizer, max_prompt_length=limit, check=answer_check(verifiers))
    report(examples, path, console)
    for count, what in ((examples.filtered, "left out"), (examples.truncated, "cut")):
        if count:
            console.print(f"{path}: {count} prompts longer than {limit} tokens were {what}", style="yellow")
    return examples


def evaluate_parts(
    config: Config, parts: Parts, console: Console, *, begins: Callable[[str], None] = lambda what: None
) -> dict[str, float]:
    """The metrics of each set of questions; prints as many of its responses as the config says."""
    if not parts.evaluation:
        raise ValueError("data.eval is not set: write the path of a JSON lines file")
    metrics: dict[str, float] = {}
    for name, asked in config.evaluations().items():
        examples = parts.evaluation[name].rows[: asked.limit]
        found = evaluate(
            sources_of(config, parts.execution, parts.tokenizer, examples, seed=config.seed + SEED_OFFSET),
            examples,
            score=lambda rows: verify(config.verifiers(asked.verifier)[0], rows, config.scoring),  # noqa: B023 - in the loop
            sampling=asked.sampling.over(config.sampling),
            samples=asked.samples,
            show=partial(print_samples, console, f"evaluation {name}".rstrip(), count=config.evaluation.print_samples),
            begins=begins,
            vote=asked.vote,
        )
        metrics |= {f"{name}/{metric}".lstrip("/"): value for metric, value in found.items()}
    return metrics


def start(config: Config, console: Console) -> int:
    """Start a new run; returns the exit code."""
    from rlprims.execution.hf._router_loss import router_note

    for warning in config.warnings():
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    check_loggers(config)
    config = with_time(config)
    with RunDirectory.claim(config.run_dir, config.checkpoint.copy_to) as run:
        with on_interrupt(console, "stopped during the start: there is no run yet"):
            parts = build(config, console)
        with closing(parts.execution):
            for note in filter(None, (filter_note(config, parts.training.rows[0]), router_note(config.model))):
                console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
            run.begin(config)
            return _RlRun(config, run, parts, console).run()


def resume(run: RunDirectory, config: Config, console: Console, *, overrides: Sequence[str] = ()) -> int:
    """Continue from the newest complete checkpoint with the same numbers; returns the exit code."""
    check_loggers(config)
    checkpoint = lock_and_find_checkpoint(run, console)
    with on_interrupt(console, f"stopped during the start: {run.path} is unchanged"):
        parts = build(config, console)
    with closing(parts.execution):
        session = _RlRun(config, run, parts, console)
        return begin_or_resume(run, checkpoint, session, console, overrides)


class _RlRun(Run):
    def __init__(self, config: Config, run: RunDirectory, parts: Parts, console: Console) -> None:
        self.config, self.parts = config, parts
        self.trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
        self.recording_tokenizer = deepcopy(parts.tokenizer)  # two threads cannot use one tokenizer
        asked = config.evaluation
        best = Best(asked.best, run.path / "best.json", stop_at=asked.stop_at, patience=asked.patience)
        super().__init__(config, run, parts.execution, parts.workers, self.trainer, console, best, ProgressLine)

    def hooks(self) -> list[Hook]:
        audited = [AuditedStep(self.run_directory, self.recording_tokenizer, self.console)] * self.config.audit
        return [EqualScores(self.console), Bounds(self.config, self.console), *audited]

    def record(self, step: StepResult) -> None:
        sampled = [step.batch, *(rows for rows, _ in step.dropped)]
        print_samples(self.console, f"step {step.number}", sampled, self.config.print_samples)
        rows = step.batch[: self.config.log_samples]
        table = {name: rows[name].tolist() for name in ("prompt", "response", "scores")} if len(rows) else {}
        for logger in self.loggers if table else ():
            if (log_table := getattr(logger, "log_table", None)) is not None:
                advantages = (rows["advantages"].sum(-1) / rows["response_mask"].sum(-1)).tolist()
                log_table({**table, "advantage": advantages}, step.number)
        if self.config.record_rollouts and step.number % self.config.record_rollouts_every == 0:
            write = partial(self.run_directory.write_rollouts, compress=self.config.compress_rollouts)
            copy = step.copy()  # the next step may add columns to the rows
            self.recording.begin(lambda: write(copy, self.recording_tokenizer))

    def evaluate(self) -> None:
        if not self.parts.evaluation:
            return
        metrics = evaluate_parts(self.config, self.parts, self.console)
        metrics |= worker_metrics(self.parts.workers.reports())
        step = self.trainer.step_number
        self.write("eval", step, {**metrics, "generated_tokens_total": self.trainer.generated_tokens})
        if self.best.record(step, metrics):
            self.save()
        for name in self.parts.evaluation:
            of = name and f"{name}/"
            right = ", ".join(f"{metrics[f'{of}{kind}/acc']:.3f} {kind}" for kind in ("sampled", "greedy"))
            text = f"step {step}{name and f', {name}'}: accuracy {right}, length {metrics[f'{of}sampled/length']:.1f}"
            if unscored := metrics[f"{of}sampled/unscored"]:
                text += f"; {unscored:.0%} of the responses could not be scored and count as wrong"
            self.console.print(text, highlight=False, soft_wrap=True)

    def finish(self, seconds: float) -> None:
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
