"""The command line: ``rlprims train | resume | eval | plot | rollouts | algorithms | doctor``."""

import argparse
import inspect
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlprims import algorithms
from rlprims.algorithms import PRESETS, Algorithm

_RESUMABLE = ("steps", "evaluation", "checkpoint", "log_to", "threads", "record_rollouts", "num_examine", "optimizer",
              "profile", "algorithm.filter", "model.max_", "ray")  # fmt: skip
"""What may change on resume: the rest would make another run of it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. Errors of the user's making are one message, not a traceback."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=False)
    try:
        code: int = options.run(options, console)
    except ValueError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


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
    rollouts.add_argument("--step", type=int, help="default: the last one recorded")
    rollouts.add_argument("--count", type=int, default=8, help="samples to print (default 8)")
    rollouts.add_argument("--source", help="only this data source")
    rollouts.add_argument("--html", type=Path, metavar="FILE", help="one page of all steps instead of the terminal")
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


def _train(options: argparse.Namespace, console: Console) -> int:
    from rlprims.trainer.config import load_config
    from rlprims.trainer.session import start

    return start(load_config(options.config, options.overrides), console)


def _resume(options: argparse.Namespace, console: Console) -> int:
    from rlprims.trainer.run_directory import RunDirectory
    from rlprims.trainer.session import resume

    for override in options.overrides:
        if not override.startswith(_RESUMABLE):
            raise ValueError(f"{override}: on resume only {', '.join(_RESUMABLE)} may change; start a new run for this")
    run = RunDirectory.open(options.run_directory)
    return resume(run, run.config(options.overrides), console)


def _evaluate(options: argparse.Namespace, console: Console) -> int:
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
    table = Table("metric", "value", title=f"{weights} on {config.data.eval}")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4g}")
    console.print(table)
    return 0


def _plot(options: argparse.Namespace, console: Console) -> int:
    from rlprims.trainer.curves import draw_curves, summary_table

    console.print(f"plot: {draw_curves(options.runs, options.out or options.runs[0] / 'curves.png')}", highlight=False)
    console.print(summary_table(options.runs))
    return 0


def _rollouts(options: argparse.Namespace, console: Console) -> int:
    from rlprims.trainer.rollouts import print_rollouts, write_page

    if options.html:
        console.print(f"page: {write_page(options.run_directory, options.html)}", highlight=False)
    else:
        print_rollouts(options.run_directory, step=options.step, count=options.count, source=options.source)
    return 0


def _algorithms(options: argparse.Namespace, console: Console) -> int:
    chosen = [_preset(name) for name in options.names]
    if not chosen:
        table = Table("preset", "what it is", title="rlprims algorithms NAME shows one, NAME NAME compares two")
        for name, preset in sorted(PRESETS.items()):
            table.add_row(name, (preset.__doc__ or "").splitlines()[0])
        console.print(table)
    elif len(chosen) == 2:
        table = Table("knob", *(algorithm.name for algorithm in chosen))
        for knob, values in algorithms.diff(*chosen).items():
            table.add_row(knob, *map(str, values))
        console.print(table)
    else:
        for name, algorithm in zip(options.names, chosen, strict=True):
            if options.yaml:
                console.print(algorithm.to_yaml(), markup=False, highlight=False)
            else:
                console.print(_described(name, algorithm), markup=False, highlight=False)
    return 0


def _doctor(options: argparse.Namespace, console: Console) -> int:
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
