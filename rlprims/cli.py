"""The command line: ``rlprims train | fit | data | resume | eval | export | plan | plot | rollouts | ...``."""

import argparse
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from rlprims import algorithms
from rlprims._arguments import RESUMABLE, parser
from rlprims._extras import hint
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
        code = _COMMANDS[options.command](options, open_console())
    except ValueError as error:
        return _failed(str(error), _notes(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _TRAIN_MODULES | _DATA_MODULES:
            raise
        extra = "data" if package in _DATA_MODULES else "train"
        return _failed(f"this command needs {package}, which is not installed: {hint(extra)}")
    except KeyboardInterrupt:
        return 130
    return code


def _failed(message: str, notes: Sequence[str] = ()) -> int:
    console = open_console(stderr=True)
    console.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    if notes:
        with suppress(OSError), NamedTemporaryFile("w", prefix="rlprims-", suffix=".txt", delete=False) as file:
            file.write("\n\n".join(notes) + "\n")
            console.print(f"traceback: {file.name}", style="dim", highlight=False, soft_wrap=True)
    return 2


def _notes(error: BaseException | None) -> list[str]:
    """The notes of an error and of its causes. A worker's error has the worker's traceback as a note."""
    notes = list[str]()
    while error is not None:
        notes += getattr(error, "__notes__", [])
        error = error.__cause__
    return notes


def _train(options: argparse.Namespace, console: Any) -> int:
    from rlprims.trainer import session
    from rlprims.trainer.config import Config

    return _begin(options, console, Config, session.start, session.resume)


def _fit(options: argparse.Namespace, console: Any) -> int:
    from rlprims.fit import session
    from rlprims.fit.config import FitConfig

    return _begin(options, console, FitConfig, session.fit, session.resume_fit)


def _data(options: argparse.Namespace, console: Any) -> int:
    from rlprims.doctor import rows
    from rlprims.runs.disk_errors import writing

    first = rows.first_row(options.file)
    use = options.use or rows.use_of(first)
    config = rows.config_for(options.file, use, options.layout, options.template)
    if options.to is not None:
        if options.to.exists():
            raise ValueError(f"{options.to} exists: write another place")
        with writing(options.to):
            count, bad = rows.convert(options.file, options.to, config, use)
        left_out = f"; {bad.count} rows were left out\n{bad.text()}" if bad.count else ""
        console.print(f"{options.to}: {count} {use}{left_out}", highlight=False, soft_wrap=True)
        return 0
    tokenizer, tokens = rows.tokenizing(config, use, options.model, first) if options.model else (None, None)
    found = rows.survey(options.file, config, use, tokens)
    rows.show(found, options.file, console, tokenizer)
    if options.eval is not None:
        held_out = rows.survey(options.eval, config, use)
        both = rows.overlap(found, held_out)
        console.print(f"rows of {options.eval} that are also in {options.file}: {both}", soft_wrap=True)
    return 0


def _begin(options: argparse.Namespace, console: Any, kind: Any, start: Any, resume: Any) -> int:
    """Start a run, or with ``--resume-if-exists`` continue it."""
    from rlprims.runs.config import load_as
    from rlprims.runs.directory import RunDirectory

    config = load_as(kind, options.config, options.overrides)
    if not (options.resume_if_exists and (config.run_dir / "config.yaml").exists()):
        code: int = start(config, console)
        return code
    run = RunDirectory.open(config.run_dir)
    recorded = run.config(kind)
    _note_changes(run.path, recorded, config, console)
    code = resume(run, recorded, console)
    return code


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
    if _is_fit(run):
        from rlprims.fit.config import FitConfig
        from rlprims.fit.session import resume_fit

        return resume_fit(run, run.config(FitConfig, options.overrides), console, overrides=options.overrides)
    from rlprims.trainer.config import Config
    from rlprims.trainer.session import resume

    return resume(run, run.config(Config, options.overrides), console, overrides=options.overrides)


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
        if options.what.is_dir():
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
            config = load_config(options.what, options.overrides)
            what = weights = config.model.path
        # Only the policy is needed: no reward model, and an algorithm without reference and critic.
        needed = {"model": config.model.model_copy(update={"reward": None}), "algorithm": algorithms.reinforce()}
        parts = build(config.model_copy(update=needed), console, weights=weights)
        with closing(parts.execution):
            metrics = evaluate_parts(config, parts, console)
    rows = [(name, f"{value:.4g}") for name, value in metrics.items()]
    console.print(make_table(("metric", "value"), rows, title=f"{what} on {config.data.eval}"))
    return 0


def _plan(options: argparse.Namespace, console: Any) -> int:
    from rlprims.plan import scale
    from rlprims.plan.memory import lengths_of, plan, table
    from rlprims.trainer.config import load_config

    config = load_config(options.config, options.overrides)
    prompts = lengths_of(config, options.prompt_tokens)
    console.print(table(plan(config, prompts)))
    given = (options.tflops, options.memory_bandwidth, options.network)
    if any(given):
        if not all(given):
            raise ValueError("the seconds of a step need --tflops, --memory-bandwidth and --network together")
        rates = scale.Rates(given[0] * 1e12, given[1] * 1e9, given[2] * 1e9, options.disk and options.disk * 1e9)
        found = scale.phases(config, prompts, rates, options.response_tokens)
        console.print(scale.table(config, found, scale.checkpoint(config, rates)))
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


def _algorithms(options: argparse.Namespace, console: Any) -> int:
    chosen = [_preset(name) for name in options.names]
    if not chosen:
        rows = [(name, (preset.__doc__ or "").splitlines()[0]) for name, preset in sorted(PRESETS.items())]
        title = "rlprims algorithms NAME shows one, NAME NAME compares two"
        console.print(make_table(("preset", "description"), rows, title=title))
    elif len(chosen) == 2:
        differences = [(setting, *map(str, values)) for setting, values in algorithms.diff(*chosen).items()]
        console.print(make_table(("setting", *(algorithm.name for algorithm in chosen)), differences))
    else:
        for name, algorithm in zip(options.names, chosen, strict=True):
            if options.yaml:
                console.print(algorithm.to_yaml(), markup=False, highlight=False)
            else:
                console.print(_description(name, algorithm), markup=False, highlight=False)
    return 0


def _doctor(options: argparse.Namespace, console: Any) -> int:
    from rlprims.doctor.installation import kernel_table, run_checks, table

    if options.kernels:
        console.print(kernel_table())
        return 0
    model, config = options.model, None
    if model is not None and model.endswith((".yaml", ".yml")):
        from rlprims.trainer.config import load_config

        config = load_config(Path(model), options.overrides)
        model = config.model.path
    if not options.cluster:
        console.print(table(run_checks(model)))
        return 0
    if config is None:
        raise ValueError("doctor --cluster needs a config with execution: ray: rlprims doctor --cluster CONFIG.yaml")
    from rlprims.doctor.cluster import try_cluster

    findings = list(try_cluster(config, console))
    console.print(table(findings, "rlprims doctor --cluster"))
    return 0 if all(finding.ok for finding in findings) else 1


def _preset(name: str) -> Algorithm:
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}: choose from {', '.join(sorted(PRESETS))}")
    return PRESETS[name]()


def _description(name: str, algorithm: Algorithm) -> str:
    paragraphs = inspect.cleandoc(PRESETS[name].__doc__ or "").split("\n\n")
    doc = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    stages = [f"  {stage:<18}{part}" for stage, part in algorithm.uses()]
    numbers = [f"  {field:<18}{getattr(algorithm, field)}" for field in ("group_size", "epochs", "mini_batches")]
    needs = ", ".join(sorted(algorithm.needs))
    return "\n".join([doc, "", "stages", *stages, *numbers, "", f"needs: {needs}", ""])


_COMMANDS: dict[str, Callable[[argparse.Namespace, Any], int]] = {
    "train": _train,
    "fit": _fit,
    "data": _data,
    "resume": _resume,
    "eval": _evaluate,
    "export": _export,
    "plan": _plan,
    "plot": _plot,
    "rollouts": _rollouts,
    "algorithms": _algorithms,
    "doctor": _doctor,
}
