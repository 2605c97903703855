"""The command line: ``rlprims train | fit | data | resume | eval | export | plan | plot | rollouts | ...``."""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlprims import algorithms
from rlprims._arguments import RESUMABLE, parser
from rlprims._extras import hint
from rlprims._files import details_of
from rlprims._near import suggest
from rlprims.algorithms import PRESETS, Algorithm
from rlprims.reports.terminal import make_table, open_console

_TRAIN_MODULES = {"transformers", "tokenizers", "safetensors", "matplotlib", "rich", "yaml"}
"""Modules of the extra ``train``, which only some commands import."""
_DATA_MODULES = {"pyarrow", "datasets"}
"""Modules of the extra ``data``, which only some files need."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. An error of the user or of a worker is one message without a traceback."""
    options = parser().parse_args(arguments)
    try:
        return _COMMANDS[options.command](options, open_console())
    except ValueError as error:
        return _failed(str(error), details_of(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _TRAIN_MODULES | _DATA_MODULES:
            raise
        extra = "data" if package in _DATA_MODULES else "train"
        return _failed(f"this command needs {package}, which is not installed: {hint(extra)}")
    except KeyboardInterrupt as stopped:
        if not hasattr(stopped, "__notes__"):
            open_console(stderr=True).print("stopped", style="yellow")
        return 130


def _failed(message: str, details: Path | None = None) -> int:
    console = open_console(stderr=True)
    console.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    if details:
        console.print(f"details: {details}", style="dim", highlight=False, soft_wrap=True)
    return 2


def _session(*, of_rows: bool) -> tuple[Any, Callable[..., int], Callable[..., int]]:
    """The settings of a run on stored rows or on samples, and the functions that start and resume it."""
    if of_rows:
        from rlprims.fit.config import FitConfig
        from rlprims.fit.session import fit, resume_fit

        return FitConfig, fit, resume_fit
    from rlprims.trainer.config import Config
    from rlprims.trainer.session import resume, start

    return Config, start, resume


def _data(options: argparse.Namespace, console: Any) -> int:
    from rlprims.doctor import rows
    from rlprims.runs.disk_errors import writing

    if options.file.endswith((".yaml", ".yml")):
        asked = rows.of_run(Path(options.file), options.overrides)
    else:
        if options.overrides:
            raise ValueError(f"{options.overrides[0]}: only the settings of a run, CONFIG.yaml, have overrides")
        asked = rows.of_file(options.file, options.use, options.layout, options.template, options.model)
    if options.to is not None:
        if options.to.exists():
            raise ValueError(f"{options.to} exists: write another place")
        with writing(options.to):
            count, bad = rows.convert(asked, options.to)
        left_out = f"; {bad.count} rows were left out\n{bad.text()}" if bad.count else ""
        console.print(f"{options.to}: {count} {asked.use}{left_out}", highlight=False, soft_wrap=True)
        return 0
    tokenizer, tokens = rows.tokenizing(asked) if asked.model else (None, None)
    found = rows.survey(asked, tokens)
    rows.show(found, asked.path, console, tokenizer)
    if (held_out := options.eval or asked.config.eval) is not None:
        both = rows.overlap(found, rows.survey(asked._replace(path=held_out)))
        console.print(f"rows of {held_out} that are also in {asked.path}: {both}", highlight=False, soft_wrap=True)
    return 0


def _begin(options: argparse.Namespace, console: Any) -> int:
    """Start a run, or with ``--resume-if-exists`` continue it."""
    from rlprims.runs.config import load_as
    from rlprims.runs.directory import RunDirectory

    kind, start, resume = _session(of_rows=options.command == "fit")
    config = load_as(kind, options.config, options.overrides)
    run = RunDirectory.found(config.run_dir, config.checkpoint.copy_to) if options.resume_if_exists else None
    if run is None:
        return start(config, console)
    recorded = run.config(kind)
    _note_changes(run.path, recorded, config, console)
    return resume(run, recorded, console)


def _note_changes(path: Path, recorded: Any, config: Any, console: Any) -> None:
    """Print the settings that differ from those of the run, which the run does not take over."""
    changed = _changed(recorded.model_dump(mode="json"), config.model_dump(mode="json"))
    if changed := [name for name in changed if name != "data.time" or config.data.time is not None]:
        note = f"note: the run keeps its own {', '.join(changed)}; rlprims resume {path} key=value changes some"
        console.print(note, style="yellow", highlight=False, soft_wrap=True)


def _changed(old: Any, new: Any, place: str = "") -> list[str]:
    """The settings that differ, by their dotted names."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [place] if old != new else []
    keys = sorted(old.keys() | new.keys())
    return [name for key in keys for name in _changed(old.get(key), new.get(key), f"{place}.{key}".lstrip("."))]


def _resume(options: argparse.Namespace, console: Any) -> int:
    from rlprims.runs.directory import RunDirectory

    for override in options.overrides:
        if override.startswith("execution="):
            raise ValueError(
                f"{override}: one process and ranks save optimizers in different forms; start a new run from its "
                f"weights: rlprims export {options.run_directory} FOLDER, then rlprims train "
                f"{options.run_directory}/config.yaml {override} model.path=FOLDER run_dir=NEW"
            )
        if not override.startswith(RESUMABLE):
            raise ValueError(f"{override}: on resume only {', '.join(RESUMABLE)} may change; start a new run for this")
    run = RunDirectory.open(options.run_directory)
    kind, _, resume = _session(of_rows=_is_fit(run))
    return resume(run, run.config(kind, options.overrides), console, overrides=options.overrides)


def _is_fit(run: Any) -> bool:
    """Whether ``rlprims fit`` made the run."""
    from rlprims.runs.config import read_yaml

    return "algorithm" not in read_yaml(run.path / "config.yaml")


def _export(options: argparse.Namespace, console: Any) -> int:
    from transformers.utils import logging

    from rlprims.execution.hf import export_model
    from rlprims.runs.checkpoint import damage_of, newest_checkpoint
    from rlprims.runs.directory import RunDirectory
    from rlprims.runs.disk_errors import writing

    run = RunDirectory.open(options.run_directory)
    if options.step is None:
        checkpoint = newest_checkpoint(run.checkpoints, warn=lambda text: console.print(text, style="yellow"))
    else:
        checkpoint = run.checkpoints / f"step_{options.step:06d}"
        if (damage := damage_of(checkpoint)) is not None:
            found = sorted(path.name for path in run.checkpoints.glob("step_*"))
            raise ValueError(f"{checkpoint}: {damage}; expected a step of {', '.join(found)}")
    name = options.model or ("reward" if (checkpoint / "reward").is_dir() else "policy")
    logging.disable_progress_bar()
    with writing(options.folder):
        export_model(checkpoint / name, options.folder)
    console.print(f"model: {options.folder}, the {name} of {checkpoint}", highlight=False, soft_wrap=True)
    return 0


def _evaluate(options: argparse.Namespace, console: Any) -> int:
    from transformers.utils import logging

    from rlprims.runs.checkpoint import newest_checkpoint, policy_of
    from rlprims.runs.directory import RunDirectory
    from rlprims.trainer.config import Config, load_config
    from rlprims.trainer.session import build, evaluate_parts

    logging.disable_progress_bar()
    with ExitStack() as held:
        if "://" in options.what or Path(options.what).is_dir():
            run = RunDirectory.open(options.what)
            if _is_fit(run):
                raise ValueError(
                    f"{run.path} is a run on stored rows, which has no questions: evaluate its model with the config "
                    f"of another run, rlprims eval CONFIG.yaml model.path={run.path}/checkpoints/STEP/policy"
                )
            config = run.config(Config, options.overrides)
            checkpoint = newest_checkpoint(run.checkpoints, warn=lambda text: console.print(text, style="yellow"))
            what, weights = str(checkpoint / "policy"), str(held.enter_context(policy_of(checkpoint)))
        else:
            config = load_config(Path(options.what), options.overrides)
            what = weights = config.model.path
        # Only the policy is needed: no reward model, and an algorithm without reference and critic.
        needed = {"model": config.model.model_copy(update={"reward": None}), "algorithm": algorithms.reinforce()}
        parts = build(config.model_copy(update=needed), console, weights=weights)
        with closing(parts.execution):
            metrics = evaluate_parts(config, parts, console, begins=lambda what: console.print(what, style="dim"))
    rows = [(name, f"{value:.4g}") for name, value in metrics.items()]
    console.print(make_table(("metric", "value"), rows, title=f"{what} on {config.data.eval}"))
    return 0


def _plan(options: argparse.Namespace, console: Any) -> int:
    from rlprims.plan.memory import plan, table
    from rlprims.plan.sizes import lengths_of
    from rlprims.trainer.config import load_config

    config = load_config(options.config, options.overrides)
    console.print(table(plan(config, lengths_of(config, options.prompt_tokens, options.prompt_pixels))))
    return 0


def _plot(options: argparse.Namespace, console: Any) -> int:
    from rlprims.reports.curves import draw_curves, summary_table

    console.print(f"plot: {draw_curves(options.runs, options.out or options.runs[0] / 'curves.png')}", highlight=False)
    console.print(summary_table(options.runs))
    return 0


def _rollouts(options: argparse.Namespace, console: Any) -> int:
    chosen = {"step": options.step, "source": options.source}
    if options.html:
        from rlprims.reports._rollout_page import write_page

        page = write_page(options.run_directory, options.html, **chosen)
        console.print(f"page: {page}", highlight=False, soft_wrap=True)
    else:
        from rlprims.reports.rollouts import print_rollouts

        print_rollouts(options.run_directory, count=options.count, **chosen)
    return 0


def _audit(options: argparse.Namespace, console: Any) -> int:
    from rlprims import audit
    from rlprims.lab._step import load_step
    from rlprims.reports.step_page import write_step_page
    from rlprims.runs.disk_errors import writing
    from rlprims.runs.end_tokens import load_end_tokens

    if options.explain is not None:
        if (code := options.explain.upper()) not in audit.CHECKS:
            raise ValueError(f"no check {options.explain!r}: {suggest(code, audit.CHECKS)}")
        console.print(inspect.getdoc(audit.CHECKS[code]), markup=False, highlight=False, soft_wrap=True)
        return 0
    if options.path is None:
        raise ValueError("expected PATH, a step's file or a run's directory, or --explain CODE")
    batch = load_step(options.path, options.step)
    tokenizer = load_end_tokens(options.tokenizer)[0] if options.tokenizer else None
    report = audit.report(batch, tokenizer=tokenizer)
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    with writing(options.json or options.html):
        if options.json:
            options.json.write_text(json.dumps(report.to_json(), indent=1), encoding="utf-8")
        if options.html:
            write_step_page(batch, report, options.html, tokenizer=tokenizer, title=options.path.name)
    return 1 if report.errors else 0


def _algorithms(options: argparse.Namespace, console: Any) -> int:
    if unknown := [name for name in options.names if name not in PRESETS]:
        raise ValueError(f"no preset {unknown[0]!r}: choose from {', '.join(sorted(PRESETS))}")
    chosen = [PRESETS[name]() for name in options.names]
    if not chosen:
        rows = [(name, (preset.__doc__ or "").splitlines()[0]) for name, preset in sorted(PRESETS.items())]
        title = "rlprims algorithms NAME shows one, NAME NAME compares two"
        console.print(make_table(("preset", "description"), rows, title=title))
    elif len(chosen) == 2:
        differences = [(setting, *map(str, values)) for setting, values in algorithms.diff(*chosen).items()]
        console.print(make_table(("setting", *(algorithm.name for algorithm in chosen)), differences))
    else:
        for name, algorithm in zip(options.names, chosen, strict=True):
            text = algorithm.to_yaml() if options.yaml else _description(name, algorithm)
            console.print(text, markup=False, highlight=False)
    return 0


def _doctor(options: argparse.Namespace, console: Any) -> int:
    from rlprims.doctor.installation import run_checks, table

    model, config = options.model, None
    if model is not None and Path(model).name == "failed_call" and not (options.gpu or options.cluster):
        from rlprims.doctor.model import call_again

        return call_again(Path(model), options.overrides, console)
    if model is not None and model.endswith((".yaml", ".yml")):
        from rlprims.trainer.config import load_config

        config = load_config(Path(model), options.overrides)
        model = config.model.path
    if options.gpu:
        if config is None and model is not None and "=" not in model:
            raise ValueError(f"doctor --gpu takes CONFIG.yaml or key=value, not {model}: model.path is in a config")
        return _doctor_gpu(config, [model, *options.overrides] if model else [], console)
    if not options.cluster:
        if model is not None and (Path(model) / "config.yaml").is_file():
            from rlprims.doctor.run import RunFiles, diagnose

            if options.overrides:
                raise ValueError(f"{model} is a run, whose files are read: leave {options.overrides[0]} out")
            rows = list(diagnose(RunFiles.read(Path(model))))
            console.print(make_table(("", "cause", "found", "to write"), rows, title=model, styles={"no": "red"}))
            return 1 if any(row[0] == "no" for row in rows) else 0
        console.print(table(run_checks(model)))
        if config is None:
            return 0
        from rlprims.doctor.model import try_model as tried
    elif config is None:
        raise ValueError("doctor --cluster needs a config with execution: ray: rlprims doctor --cluster CONFIG.yaml")
    else:
        from rlprims.doctor.cluster import try_cluster as tried
    findings = list(tried(config, console))
    console.print(table(findings, "rlprims doctor --cluster" if options.cluster else config.model.path))
    return 0 if all(finding.ok for finding in findings) else 1


def _doctor_gpu(config: Any, overrides: list[str], console: Any) -> int:
    from rlprims.doctor import gpu

    lines = []
    with TemporaryDirectory() as folder:
        for line in gpu.try_gpu(config or gpu.made_config(Path(folder), overrides), console):
            console.print(f"{line.what}: {line.found}", style="dim", highlight=False, soft_wrap=True)
            lines.append(line)
    rows = [(gpu.MARKS[line.ok], line.what, line.found, line.note) for line in lines]
    styles = {"ok": "green", "no": "red"}
    console.print(make_table(("", "what", "found", "meaning"), rows, title="rlprims doctor --gpu", styles=styles))
    Path("doctor-gpu.json").write_text(json.dumps([line._asdict() for line in lines], indent=1), encoding="utf-8")
    Path("doctor-gpu.md").write_text(gpu.page(lines), encoding="utf-8")
    console.print("wrote doctor-gpu.json and doctor-gpu.md", highlight=False)
    return 1 if any(line.ok is False for line in lines) else 0


def _check(options: argparse.Namespace, console: Any) -> int:
    from rlprims.testing._any_function import verdicts

    sys.path.append(os.getcwd())
    fn = algorithms.import_path(options.function if ".py:" in options.function else options.function.replace(":", "."))
    pairs = [pair.split("=", 1) for pair in options.arguments.split(",") if pair]
    if wrong := [pair[0] for pair in pairs if len(pair) < 2]:
        raise ValueError(f"--arguments: expected name=value, got {wrong[0]!r}")
    found = verdicts(fn, options.function, options.command.removeprefix("check-"), dict(pairs))
    causes: dict[str, list[str]] = {}
    for law, (cause, _) in found.items():
        causes.setdefault(cause, []).append(law)
    lines = [f"satisfied: {', '.join(causes.pop('', ['no law']))}"]
    for cause, laws in causes.items():
        program = next((found[law][1] for law in laws if found[law][1]), "")
        lines += ["", f"broken: {', '.join(laws)}", f"  {cause}", *program.splitlines()]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return 1 if causes else 0


def _description(name: str, algorithm: Algorithm) -> str:
    paragraphs = inspect.cleandoc(PRESETS[name].__doc__ or "").split("\n\n")
    doc = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    stages = [f"  {stage:<18}{part}" for stage, part in algorithm.uses()]
    numbers = [f"  {field:<18}{getattr(algorithm, field)}" for field in ("group_size", "epochs", "mini_batches")]
    needs = ", ".join(sorted(algorithm.needs))
    return "\n".join([doc, "", "stages", *stages, *numbers, "", f"needs: {needs}", ""])


_COMMANDS: dict[str, Callable[[argparse.Namespace, Any], int]] = {
    "train": _begin, "fit": _begin, "data": _data, "resume": _resume, "eval": _evaluate, "export": _export,
    "plan": _plan, "plot": _plot, "rollouts": _rollouts, "audit": _audit, "algorithms": _algorithms, "doctor": _doctor,
    "check-loss": _check, "check-advantage": _check,
}  # fmt: skip
