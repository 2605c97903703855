"""The command line: ``rlprims train | fit | resume | eval | export | plan | plot | rollouts | algorithms | doctor``."""

import argparse
import inspect
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from rlprims import algorithms
from rlprims._extras import hint
from rlprims.algorithms import PRESETS, Algorithm
from rlprims.reports.terminal import make_table, open_console

_RESUMABLE = ("steps", "epochs", "evaluation", "checkpoint", "log_to", "threads", "record_rollouts",
              "compress_rollouts", "num_examine", "optimizer", "profile", "algorithm.filter", "model.max_",
              "ray")  # fmt: skip
"""Beginnings of settings that may change in a resume. With any other change it would be a different run."""
_TRAIN_MODULES = {"transformers", "tokenizers", "safetensors", "matplotlib", "rich", "yaml"}
"""Modules of the extra ``train``, which only some commands import."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. An error of the user or of a worker is one message without a traceback."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options, open_console())
    except ValueError as error:
        return _failed(str(error), _notes(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _TRAIN_MODULES:
            raise
        return _failed(f"this command needs {package}, which is not installed: {hint('train')}")
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlprims", description="RL algorithm primitives for LLM post-training: the reference trainer."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="start a run",
        description="Start a run from a YAML file. The file can name modules of its folder (verifier: mine.reward). "
        "The folder is searched after all installed packages. A setting may name any function, which then runs: start "
        "no file that you do not trust.",
    )
    train.add_argument("config", type=Path, metavar="CONFIG.yaml")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="such as seed=1 algorithm.group_size=8")
    train.add_argument(
        "--resume-if-exists",
        action="store_true",
        help="continue the run in run_dir, with its own config; start it if there is none. So the same command begins "
        "a job and restarts it",
    )
    train.set_defaults(run=_train)

    fit = commands.add_parser(
        "fit",
        help="train on stored rows: SFT, preference pairs, a reward model",
        description="Train on a JSON lines file with the settings of a YAML file. The loss defines the form of rows. "
        "loss: sft, the default, is supervised fine-tuning on rows with prompt and response, or messages of a chat. "
        "loss: dpo, or another loss on pairs, reads rows with prompt, chosen and rejected. loss: bradley_terry trains "
        "a reward model on such rows. The result is a Hugging Face folder, for model.path or model.reward of another "
        "run. rlprims resume continues a run.",
    )
    fit.add_argument("config", type=Path, metavar="CONFIG.yaml")
    fit.add_argument("overrides", nargs="*", metavar="key=value", help="such as epochs=3 loss=dpo loss.beta=0.2")
    fit.add_argument(
        "--resume-if-exists", action="store_true", help="continue the run in run_dir; start it if there is none"
    )
    fit.set_defaults(run=_fit)

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

    export = commands.add_parser(
        "export",
        help="a checkpoint's model, for Hugging Face",
        description="Write the model of a run's checkpoint as a Hugging Face directory, with its tokenizer. Most "
        "checkpoints of a run on Ray have only shards of it (checkpoint.hugging_face).",
    )
    export.add_argument("run_directory", type=Path, metavar="RUN")
    export.add_argument("folder", type=Path, metavar="FOLDER", help="where it is written; it must not exist yet")
    export.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    export.add_argument("--model", help="critic, for example (default: policy; of a reward model's run: reward)")
    export.set_defaults(run=_export)

    plan = commands.add_parser(
        "plan",
        help="the memory that a run will use, and the seconds of a step",
        description="Print the memory of a run, part by part, and the settings that lower it; with the rates of the "
        "hardware also the bytes and seconds of each phase of a step. Only the config of the model is read.",
    )
    plan.add_argument("config", type=Path, metavar="CONFIG.yaml")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="such as model.fused_head=true")
    plan.add_argument("--prompt-tokens", type=int, help="tokens of every prompt, if the data are not on this machine")
    rates = plan.add_argument_group(
        "seconds of a step",
        "rates that your devices reach, not those of a data sheet; the table needs the first three",
    )
    rates.add_argument("--tflops", type=float, help="of a device, 10^12 operations per second, such as 400 for an H100")
    rates.add_argument("--memory-bandwidth", type=float, help="of a device's memory, GB/s, such as 3000 for an H100")
    rates.add_argument(
        "--network", type=float, help="GB/s that a rank receives from the others, such as 50 for 400 Gb/s"
    )
    rates.add_argument("--disk", type=float, help="GB/s that a process writes, for the seconds of a checkpoint")
    rates.add_argument("--response-tokens", type=float, help="tokens of the mean response (default: the limit)")
    plan.set_defaults(run=_plan)

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

    presets = commands.add_parser("algorithms", help="the parts of a preset", description="List or show presets.")
    presets.add_argument("names", nargs="*", metavar="NAME", help="one: show it; two: compare them")
    presets.add_argument("--yaml", action="store_true", help="print it as in a config")
    presets.set_defaults(run=_algorithms)

    doctor = commands.add_parser(
        "doctor", help="what is installed and works", description="Try what is installed; say how to repair the rest."
    )
    doctor.add_argument(
        "model",
        nargs="?",
        metavar="MODEL|CONFIG.yaml",
        help="also check whether the files of the model use the same end token",
    )
    doctor.add_argument("--kernels", action="store_true", help="compare each kernel with its formula, and time both")
    doctor.add_argument(
        "--cluster",
        action="store_true",
        help="start the cluster of CONFIG.yaml (execution: ray), and time a sum over its ranks, sampling compared with "
        "the bare engine, an update, and a sync of the model; nothing is saved",
    )
    doctor.add_argument("overrides", nargs="*", metavar="key=value", help="such as ray.training_workers=8")
    doctor.set_defaults(run=_doctor)
    return parser


def _train(options: argparse.Namespace, console: Any) -> int:
    from rlprims.trainer.config import load_config
    from rlprims.trainer.run_directory import RunDirectory
    from rlprims.trainer.session import resume, start

    config = load_config(options.config, options.overrides)
    if not (options.resume_if_exists and (config.run_dir / "config.yaml").exists()):
        return start(config, console)
    run = RunDirectory.open(config.run_dir)
    recorded = run.config()
    _note_changes(run.path, recorded, config, console)
    return resume(run, recorded, console)


def _fit(options: argparse.Namespace, console: Any) -> int:
    from rlprims.trainer.config import load_as
    from rlprims.trainer.fit.config import FitConfig
    from rlprims.trainer.fit.session import fit, resume_fit
    from rlprims.trainer.run_directory import RunDirectory

    config = load_as(FitConfig, options.config, options.overrides)
    if not (options.resume_if_exists and (config.run_dir / "config.yaml").exists()):
        return fit(config, console)
    run = RunDirectory.open(config.run_dir)
    recorded = run.fit_config()
    _note_changes(run.path, recorded, config, console)
    return resume_fit(run, recorded, console)


def _note_changes(path: Path, recorded: Any, config: Any, console: Any) -> None:
    """Print the settings that differ from those of the run, which the run does not take over."""
    if changed := _changed(recorded.model_dump(mode="json"), config.model_dump(mode="json")):
        note = f"note: the run keeps its own {', '.join(changed)}; rlprims resume {path} key=value changes some"
        console.print(note, style="yellow", highlight=False, soft_wrap=True)


def _changed(old: Any, new: Any, place: str = "") -> list[str]:
    """The settings that differ, by their dotted names."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [place] if old != new else []
    keys = sorted(old.keys() | new.keys())
    return [name for key in keys for name in _changed(old.get(key), new.get(key), f"{place}.{key}".lstrip("."))]


def _resume(options: argparse.Namespace, console: Any) -> int:
    from rlprims.trainer.run_directory import RunDirectory
    from rlprims.trainer.session import resume

    for override in options.overrides:
        if override.startswith("execution="):
            raise ValueError(
                f"{override}: one process and ranks save optimizers in different forms; start a new run from its "
                f"weights: rlprims export {options.run_directory} FOLDER, then rlprims train "
                f"{options.run_directory}/config.yaml {override} model.path=FOLDER run_dir=NEW"
            )
        if not override.startswith(_RESUMABLE):
            raise ValueError(f"{override}: on resume only {', '.join(_RESUMABLE)} may change; start a new run for this")
    run = RunDirectory.open(options.run_directory)
    if run.is_fit:
        from rlprims.trainer.fit.session import resume_fit

        return resume_fit(run, run.fit_config(options.overrides), console, overrides=options.overrides)
    return resume(run, run.config(options.overrides), console, overrides=options.overrides)


def _export(options: argparse.Namespace, console: Any) -> int:
    from transformers.utils import logging

    from rlprims.execution.hf import export_model
    from rlprims.trainer.checkpoint import damage_of, newest_checkpoint
    from rlprims.trainer.run_directory import RunDirectory
    from rlprims.trainer.writing import writing

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

    from rlprims.trainer.checkpoint import newest_checkpoint, policy_of
    from rlprims.trainer.config import load_config
    from rlprims.trainer.run_directory import RunDirectory
    from rlprims.trainer.session import build, evaluate_parts

    logging.disable_progress_bar()
    with ExitStack() as held:
        if options.what.is_dir():
            run = RunDirectory.open(options.what)
            if run.is_fit:
                raise ValueError(
                    f"{run.path} is a run on stored rows, which has no questions: evaluate its model with the config "
                    f"of another run, rlprims eval CONFIG.yaml model.path={run.path}/checkpoints/STEP/policy"
                )
            config = run.config(options.overrides)
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
    from rlprims.trainer.config import load_config
    from rlprims.trainer.plan import scale
    from rlprims.trainer.plan.memory import lengths_of, plan, table

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
    from rlprims.trainer.doctor.installation import kernel_table, run_checks, table

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
    from rlprims.trainer.doctor.cluster import try_cluster

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
