"""A run on stored rows, from its config to its summary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from torch import Tensor
from transformers import AutoConfig

from rlprims.execution import ModelConfig
from rlprims.execution.hf import StoredTraining
from rlprims.execution.hf._router_loss import router_note
from rlprims.fit import loop
from rlprims.fit.config import FitConfig
from rlprims.fit.rows import Reader, StoredRows
from rlprims.reports.curves import draw_curves, read_metrics
from rlprims.reports.progress import ProgressLine
from rlprims.reports.terminal import make_table
from rlprims.runs.best_checkpoint import Best
from rlprims.runs.directory import RunDirectory
from rlprims.runs.disk_errors import writing
from rlprims.runs.end_tokens import load_tokenizer
from rlprims.runs.loggers import check_loggers
from rlprims.runs.rows import have_images, report, with_time
from rlprims.runs.run import Run, begin_or_resume, lock_and_find_checkpoint, on_interrupt, prepare_process


class _Parts(NamedTuple):
    """The checked parts of a run. They are built in this order so that mistakes are found early."""

    pad_token_id: int
    training: StoredTraining
    rows: StoredRows
    held_out: StoredRows | None


def _build(config: FitConfig, console: Console) -> _Parts:
    prepare_process(config, config.data.train, config.data.eval)
    tokenizer, ends, window = load_tokenizer(config.model.path, console, config.model)
    ends = ends or ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
    reader = Reader(config.data, config.kind, tokenizer, ends, window)
    rows = _read(config.data.train, reader, console)
    held_out = _read(config.data.eval, reader, console) if config.data.eval is not None else None
    if have_images(config.model, rows, held_out):
        _check_images(config)
    training = _training(config, config.model, tokenizer, updates=loop.steps_of(config, len(rows.rows)))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    return _Parts(pad, training, rows, held_out)


def _check_images(config: FitConfig) -> None:
    """Raise an error for what is not possible with rows that have images."""
    if config.kind == "scores":
        raise ValueError(f"{config.loss.path}: a reward model reads texts, and rows have images: use a loss on pairs")
    model = config.model.here()
    kind, other = (AutoConfig.from_pretrained(each).model_type for each in (model.path, model.reference or model.path))
    if other != kind:
        raise ValueError(f"model.reference: expected a {kind} as model.path is, which reads images, got a {other}")


def _read(path: Path | str, reader: Reader, console: Console) -> StoredRows:
    rows = reader.read(path)
    report(rows, path, console)
    limits = f"a prompt has more than {reader.max_prompt} tokens, or a row than {reader.window}"
    for count, what in (
        (rows.filtered, f"rows were left out: {limits}"),
        (rows.truncated, f"rows were cut at {reader.window} tokens"),
        (rows.equal, "pairs were left out: their responses are equal"),
    ):
        if count:
            console.print(f"{path}: {count} of {len(rows.rows) + rows.filtered + rows.equal} {what}", style="yellow")
    return rows


def fit(config: FitConfig, console: Console) -> int:
    """Start a new run; returns the exit code."""
    check_loggers(config)
    config = with_time(config)
    with RunDirectory.claim(config.run_dir, config.checkpoint.copy_to) as run:
        with on_interrupt(console, "stopped during the start: there is no run yet"):
            parts = _build(config, console)
        if config.kind != "scores" and (note := router_note(config.model)):
            console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
        run.begin(config)
        return _FitRun(config, run, parts, console).run()


def resume_fit(run: RunDirectory, config: FitConfig, console: Console, *, overrides: Sequence[str] = ()) -> int:
    """Continue from the newest complete checkpoint with the same numbers; returns the exit code."""
    check_loggers(config)
    checkpoint = lock_and_find_checkpoint(run, console)
    with on_interrupt(console, f"stopped during the start: {run.path} is unchanged"):
        session = _FitRun(config, run, _build(config, console), console)
    return begin_or_resume(run, checkpoint, session, console, overrides)


class _FitRun(Run):
    def __init__(self, config: FitConfig, run: RunDirectory, parts: _Parts, console: Console) -> None:
        self.config, self.parts = config, parts
        self.held_out_reference: Tensor | None = None
        reference: Tensor | None = None
        if loop.needs_reference(config):  # computed from the model at the start, before a checkpoint is loaded
            reference = self._reference(run, parts.rows, "train")
            if parts.held_out is not None:
                self.held_out_reference = self._reference(run, parts.held_out, "eval")
        pad = parts.pad_token_id
        trainer = loop.FitTrainer(config, parts.training, parts.rows, pad_token_id=pad, reference=reference)
        never = Best(None, run.path / "best.json", stop_at=None, patience=None)
        super().__init__(config, run, parts.training, parts.training, trainer, console, never, ProgressLine)

    def _reference(self, run: RunDirectory, rows: StoredRows, name: str) -> Tensor:
        file, digest = run.path / f"reference_{name}.safetensors", rows.digest()
        known = loop.load_reference(file, digest)
        if known is None:
            training = self.parts.training
            if self.config.model.reference is not None:  # loaded only while its log-probs are computed
                changes = {"path": self.config.model.reference, "reference": None, "lora": None}
                model = self.config.model.model_copy(update=changes)
                training = _training(self.config, model, training.tokenizer, updates=1)
            known = loop.reference_log_probs(training, rows.rows, self.config, self.parts.pad_token_id)
            loop.save_reference(file, known, digest)
        return known

    def evaluate(self) -> None:
        held_out = self.parts.held_out
        if held_out is None:
            return
        pad, reference = self.parts.pad_token_id, self.held_out_reference
        metrics = loop.measure(self.parts.training, held_out.rows, self.config, pad, reference)
        self.write("eval", self.stepper.step_number, metrics)
        text = ", ".join(f"{name.removeprefix('pairs/')} {value:.3f}" for name, value in metrics.items())
        self.console.print(f"step {self.stepper.step_number}: groups out: {text}", highlight=False, soft_wrap=True)

    def finish(self, seconds: float) -> None:
        run, rows = self.run_directory, self.parts.rows
        lines = read_metrics(run.path)
        train, held_out = ([line for line in lines if line["kind"] == kind] for kind in ("train", "eval"))
        (name,) = self.parts.training.train_states()
        model = run.checkpoints / f"step_{self.stepper.step_number:06d}" / name
        run.write_json(
            "summary.json",
            {
                "steps": self.stepper.step_number,
                "seconds": round(seconds, 1),
                "rows": len(rows.rows),
                "rows_left_out": rows.filtered,
                "pairs_of_equal_responses": rows.equal,
                "rows_truncated": rows.truncated,
                "bad_rows": rows.bad.count,
                "skipped_updates": sum(line["skipped_updates"] for line in train),
                "model": str(model),
                "before": held_out[0] if held_out else None,
                "after": held_out[-1] if held_out else None,
            },
        )
        with writing(run.path / "curves.png"):
            plot = draw_curves([run.path], run.path / "curves.png")
        shown = [name for name in ("nll", "pairs/loss", "pairs/accuracy", "pairs/margin") if name in train[-1]]
        table = [
            (kind, name, *(f"{line[name]:.4g}" if line.get(name) is not None else "–" for line in (of[0], of[-1])))
            for kind, of in (("training", train), ("groups out", held_out))
            if of
            for name in shown
        ]
        self.console.print(make_table(("rows", "metric", "first", "last"), table))
        role = "model.reward" if name == "reward" else "model.path"
        self.console.print(f"plot: {plot}\n{role}: {model}", highlight=False, soft_wrap=True)


def _training(config: FitConfig, model: ModelConfig, tokenizer: Any, *, updates: int) -> StoredTraining:
    return StoredTraining(
        model,
        config.optimizer,
        loss=config.loss,
        aggregation=config.aggregation,
        tokenizer=tokenizer,
        updates=updates,
        means=config.takes_means,
        tail_weight=config.tail_weight,
    )
