"""The command line: ``rlprims train | resume | eval | plot | rollouts | algorithms | doctor``."""

import argparse
import inspect
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rlprims import algorithms
from rlprims._extras import hint
from rlprims.algorithms import PRESETS, Algorithm
from rlprims.trainer.terminal import make_table, open_console

_RESUMABLE = ("steps", "evaluation", "checkpoint", "log_to", "threads", "record_rollouts", "num_examine", "optimizer",
              "profile", "algorithm.filter", "model.max_", "ray")  # fmt: skip
"""What may change on resume: the rest would make another run of it."""
_OF_TRAIN = {"transformers", "tokenizers", "safetensors", "matplotlib", "rich", "yaml"}
"""Modules of the extra ``train``. Only the commands that need one ask for it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. Errors of the user's making are one message, not a traceback."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options, open_console())
    except ValueError as error:
        return _failed(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _OF_TRAIN:
            raise
        return _failed(f"this command needs {package}, which is not installed: {hint('train')}")
    except KeyboardInterrupt:
        return 130
    return code


def _failed(message: str) -> int:
    open_console(stderr=True).print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlprims", description="RL algorithm primitives for LLM post-training: the reference trainer."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="start a run",
        description="Start a run from a YAML file. Modules beside the file can be named in it (verifier: mine.reward): "
        "its folder is searched after all that is installed. A setting may name any function, which then runs: start "
        "no file that you do not trust.",
    )
    train.add_argument("config", type=Path, metavar="CONFIG.yaml")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="such as seed=1 algorithm.group_size=8")
    train.set_defaults(run=_train)

    resume = commands.add_parser("resume", help="continue a run", description="Continue from the newest checkpoint.")
    resume.add_argument("run_directory", type=Path, metavar="RUN")
    resume.add_argument("overrides", nargs="*", metavar="key=value", help=f"of {', '.join(_RESUMABLE)}")
    resume.set_defaults(run=_resume)

    evaluate = commands.add_parser(
        "eval", help="evaluate a run or a model", description="Evaluate a run's newest checkpoint, or a config's model."
    )
    evaluate.add_argument("what", type=Path, metavar="RUN|CONFIG.yaml")
    evaluate.add_argument("overrides", nargs="*", metavar="key=value", help="such as evaluation.samples=16")
    evaluate.set_defaults(run=_evaluate)

    plot = commands.add_parser("plot", help="draw learning curves", description="Draw runs in one picture.")
    plot.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    plot.add_argument("--out", type=Path, help="PNG or SVG file (default: curves.png in the first run)")
    plot.set_defaults(run=_plot)

    rollouts = commands.add_parser("rollouts", help="read samples", description="Show samples with their advantages.")
    rollouts.add_argument("run_directory", type=Path, metavar="RUN")
    rollouts.add_argument("--step", type=int, help="default: the last one recorded; with --html all")
    rollouts.add_argument("--count", type=int, default=8, help="samples to print (default 8)")
    rollouts.add_argument("--source", help="only this data source")
    page = "one page of all steps, or of --step, instead of the terminal"
    rollouts.add_argument("--html", type=Path, metavar="FILE", help=page)
    rollouts.set_defaults(run=_rollouts)

    presets = commands.add_parser("algorithms", help="what a preset is made of", description="List or show presets.")
    presets.add_argument("names", nargs="*", metavar="NAME", help="one to show it, two to compare them")
    presets.add_argument("--yaml", action="store_true", help="as a config would write it")
    presets.set_defaults(run=_algorithms)

    doctor = commands.add_parser(
        "doctor", help="what is installed and works", description="Try what is installed; say what mends the rest."
    )
    doctor.add_argument("--kernels", action="store_true", help="compare each kernel with its formula, and time both")
    doctor.set_defaults(run=_doctor)
    return parser


def _train(options: argparse.Namespace, console: Any) -> int:
    from rlprims.trainer.config import load_config
    from rlprims.trainer.session import start

    return start(load_config(options.config, options.overrides), console)


def _resume(options: argparse.Namespace, console: Any) -> int:
    from rlprims.trainer.run_directory import RunDirectory
    from rlprims.trainer.session import resume

    for override in options.overrides:
        if not override.startswith(_RESUMABLE):
            raise ValueError(f"{override}: on resume only {', '.join(_RESUMABLE)} may change; start a new run for this")
    run = RunDirectory.open(options.run_directory)
    return resume(run, run.config(options.overrides), console)


def _evaluate(options: argparse.Namespace, console: Any) -> int:
    from rlprims.trainer.checkpoint import newest_checkpoint
    from rlprims.trainer.config import load_config
    from rlprims.trainer.run_directory import RunDirectory
    from rlprims.trainer.session import build, evaluate_parts

    if options.what.is_dir():
        run = RunDirectory.open(options.what)
        config = run.config(options.overrides)
        checkpoint = newest_checkpoint(run.checkpoints, warn=lambda text: console.print(text, style="yellow"))
        weights = str(checkpoint / "policy")
    else:
        config = load_config(options.what, options.overrides)
        weights = config.model.path
    # The policy alone: no reward model, and an algorithm that asks for no reference and no critic.
    needed = {"model": config.model.model_copy(update={"reward": None}), "algorithm": algorithms.reinforce()}
    parts = build(config.model_copy(update=needed), console, weights=weights)
    with closing(parts.execution):
        metrics = evaluate_parts(config, parts, console)
    rows = [(name, f"{value:.4g}") for name, value in metrics.items()]
    console.print(make_table(("metric", "value"), rows, title=f"{weights} on {config.data.eval}"))
    return 0


def _plot(options: argparse.Namespace, console: Any) -> int:
    from rlprims.trainer.curves import draw_curves, summary_table

    console.print(f"plot: {draw_curves(options.runs, options.out or options.runs[0] / 'curves.png')}", highlight=False)
    console.print(summary_table(options.runs))
    return 0


def _rollouts(options: argparse.Namespace, console: Any) -> int:
    chosen = {"step": options.step, "source": options.source}
    if options.html:
        from rlprims.trainer._rollout_page import write_page

        page = write_page(options.run_directory, options.html, **chosen)
        console.print(f"page: {page}", highlight=False, soft_wrap=True)
    else:
        from rlprims.trainer.rollouts import print_rollouts

        print_rollouts(options.run_directory, count=options.count, **chosen)
    return 0


def _algorithms(options: argparse.Namespace, console: Any) -> int:
    chosen = [_preset(name) for name in options.names]
    if not chosen:
        rows = [(name, (preset.__doc__ or "").splitlines()[0]) for name, preset in sorted(PRESETS.items())]
        title = "rlprims algorithms NAME shows one, NAME NAME compares two"
        console.print(make_table(("preset", "what it is"), rows, title=title))
    elif len(chosen) == 2:
        differences = [(knob, *map(str, values)) for knob, values in algorithms.diff(*chosen).items()]
        console.print(make_table(("knob", *(algorithm.name for algorithm in chosen)), differences))
    else:
        for name, algorithm in zip(options.names, chosen, strict=True):
            if options.yaml:
                console.print(algorithm.to_yaml(), markup=False, highlight=False)
            else:
                console.print(_described(name, algorithm), markup=False, highlight=False)
    return 0


def _doctor(options: argparse.Namespace, console: Any) -> int:
    from rlprims.trainer.doctor import examine, kernel_table, table

    console.print(kernel_table() if options.kernels else table(examine()))
    return 0


def _preset(name: str) -> Algorithm:
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}: choose from {', '.join(sorted(PRESETS))}")
    return PRESETS[name]()


def _described(name: str, algorithm: Algorithm) -> str:
    paragraphs = inspect.cleandoc(PRESETS[name].__doc__ or "").split("\n\n")
    doc = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    stages = [f"  {stage:<18}{part}" for stage, part in algorithm.uses()]
    numbers = [f"  {field:<18}{getattr(algorithm, field)}" for field in ("group_size", "epochs", "mini_batches")]
    needs = ", ".join(sorted(algorithm.needs))
    return "\n".join([doc, "", "stages", *stages, *numbers, "", f"needs: {needs}", ""])
