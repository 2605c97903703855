"""The arguments of the commands."""

import argparse
import re
from pathlib import Path
from typing import NoReturn, TypeAlias

from rlprims import __version__
from rlprims._near import near

_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"
RESUMABLE = ("steps", "epochs", "audit", "evaluation", "checkpoint", "log_", "threads", "record_rollouts",
              "compress_rollouts", "print_samples", "optimizer", "profile", "algorithm.filter", "model.max_",
              "ray")  # fmt: skip
"""Beginnings of settings that may change in a resume. With any other change it would be a different run."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """A word that helps, behind argparse's."""
        if setting := re.match(r"unrecognized arguments: --(\w[\w.]*=\S*)", message):
            message += f"; a setting has no dashes: {setting[1]}"
        if (choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)) and (
            meant := near(choice[1], re.findall(r"\w+", choice[2]))
        ):
            message = f"there is no {choice[1]!r}: did you mean {meant!r}?"
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """The arguments of every command; ``command`` has its name."""
    parser = _Parser(prog="rlprims", description="RL algorithm primitives for LLM post-training: reference trainer.")
    parser.add_argument("--version", action="version", version=f"rlprims {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for add in (_add_training, _add_data, _add_runs, _add_plan, _add_reports, _add_doctor, _add_checks):
        add(commands)
    return parser


def _add_training(commands: _Commands) -> None:
    train = commands.add_parser(
        "train",
        help="start a run",
        description="Start a run from a YAML file. The file can name modules of its folder (verifier: mine.reward). "
        "The folder is searched after all installed packages. A setting may name any function, which then runs: start "
        "no file that you do not trust.",
    )
    _add_config(train, "seed=1 algorithm.group_size=8")
    fit = commands.add_parser(
        "fit",
        help="train on stored rows: SFT, preference pairs, a reward model",
        description="Train on a JSON lines file with the settings of a YAML file. The loss defines the form of rows. "
        "loss: sft, the default, is supervised fine-tuning on rows with prompt and response, or messages of a chat. "
        "loss: dpo, or another loss on pairs, reads rows with prompt, chosen and rejected. loss: bradley_terry trains "
        "a reward model on such rows. The result is a Hugging Face folder, for model.path or model.reward of another "
        "run. rlprims resume continues a run.",
    )
    _add_config(fit, "epochs=3 loss=dpo loss.beta=0.2")
    again = "continue the run in run_dir, with its own config; start it if there is none. So the same command begins a "
    for each in (train, fit):
        each.add_argument("--resume-if-exists", action="store_true", help=f"{again}job and restarts it")


def _add_data(commands: _Commands) -> None:
    data = commands.add_parser(
        "data",
        help="what a file of rows has, before a run",
        description="Show the layout of a file, its columns, rows, lengths, duplicates, and rows that cannot be used; "
        "with --to write the rows in the fields that a run reads by default. CONFIG.yaml: the rows of these settings, "
        "as the run would read them, and answers that its verifier cannot score; it needs none of the options.",
    )
    files = "JSON lines, parquet, arrow, a folder of datasets, or their url; or CONFIG.yaml"
    data.add_argument("file", metavar="FILE", help=files)
    data.add_argument("overrides", nargs="*", metavar="key=value", help="of CONFIG.yaml, such as data.layout=verl")
    data.add_argument("--eval", metavar="FILE", help="rows that FILE should not have: count them")
    data.add_argument("--model", help="whose tokenizer and chat template make the tokens (default: no tokens)")
    data.add_argument("--use", choices=("prompts", "demonstrations", "pairs"), help="default: by the first row")
    data.add_argument("--layout", help="name of the layout (default: by the first row)")
    data.add_argument("--template", default="chat", help="chat, the default, or text: prompts as they are")
    data.add_argument("--to", type=Path, metavar="OUT.jsonl", help="write the rows there; it must not exist yet")


def _add_config(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"such as {example}")


def _add_runs(commands: _Commands) -> None:
    resume = commands.add_parser("resume", help="continue a run", description="Continue from the newest checkpoint.")
    resume.add_argument("run_directory", metavar="RUN", help="its directory, or the url in checkpoint.copy_to")
    resume.add_argument("overrides", nargs="*", metavar="key=value", help=f"of {', '.join(RESUMABLE)}")
    evaluate = commands.add_parser(
        "eval", help="evaluate a run or a model", description="Evaluate a run's newest checkpoint, or a config's model."
    )
    evaluate.add_argument("what", metavar="RUN|CONFIG.yaml")
    evaluate.add_argument("overrides", nargs="*", metavar="key=value", help="such as evaluation.samples=16")
    export = commands.add_parser(
        "export",
        help="a checkpoint's model, for Hugging Face",
        description="Write the model of a run's checkpoint as a Hugging Face directory, with its tokenizer. Most "
        "checkpoints of a run on Ray have only shards of it (checkpoint.hugging_face).",
    )
    export.add_argument("run_directory", metavar="RUN")
    export.add_argument("folder", type=Path, metavar="FOLDER", help="where it is written; it must not exist yet")
    export.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    export.add_argument("--model", help="critic, for example (default: policy; of a reward model's run: reward)")


def _add_plan(commands: _Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="the memory that a run will use",
        description="Print the memory of a run, part by part, and the settings that lower it. Only the config of the "
        "model is read.",
    )
    _add_config(plan, "model.fused_head=true")
    plan.add_argument("--prompt-tokens", type=int, help="tokens of every prompt, if the data are not on this machine")
    plan.add_argument("--prompt-pixels", type=int, default=0, help="and numbers of its images, 3 for each pixel")


def _add_reports(commands: _Commands) -> None:
    plot = commands.add_parser("plot", help="draw learning curves", description="Draw runs in one picture.")
    plot.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    plot.add_argument("--out", type=Path, help="PNG or SVG file (default: curves.png in the first run)")
    rollouts = commands.add_parser("rollouts", help="read samples", description="Show samples with their advantages.")
    rollouts.add_argument("run_directory", type=Path, metavar="RUN")
    rollouts.add_argument("--step", type=int, help="default: the last one recorded; with --html all")
    rollouts.add_argument("--count", type=int, default=8, help="samples to print (default 8)")
    rollouts.add_argument("--source", help="only this data source")
    page = "one page of all steps, or of --step, instead of the terminal"
    rollouts.add_argument("--html", type=Path, metavar="FILE", help=page)
    reads = "Reads a saved DataProto, safetensors, JSON lines, a dump of verl, a log of TRL, or a run. Errors give 1."
    audit = commands.add_parser("audit", help="what a step of any trainer computed, and its errors", description=reads)
    audit.add_argument("path", type=Path, nargs="?", metavar="PATH", help="a file, or the directory of a run")
    audit.add_argument("--step", type=int, help="of a run (default: the last one recorded)")
    audit.add_argument("--tokenizer", metavar="DIR", help="the model's folder: show text")
    audit.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    audit.add_argument("--html", type=Path, metavar="FILE", help="write a page with the formulas, findings and tokens")
    audit.add_argument("--explain", metavar="CODE", help="what a finding means and what to write, such as M4")
    presets = commands.add_parser("algorithms", help="the parts of a preset", description="List or show presets.")
    presets.add_argument("names", nargs="*", metavar="NAME", help="one: show it; two: compare them")
    presets.add_argument("--yaml", action="store_true", help="print it as in a config")


def _add_doctor(commands: _Commands) -> None:
    doctor = commands.add_parser(
        "doctor", help="what is installed and works", description="Try what is installed; say how to repair the rest."
    )
    doctor.add_argument(
        "model",
        nargs="?",
        metavar="MODEL|CONFIG.yaml|RUN|RUN/failed_call",
        help="also check the files of a model; sample by a config; name why a run went wrong; repeat its failed call",
    )
    doctor.add_argument(
        "--gpu",
        action="store_true",
        help="compare and time kernels, sampling and an update on the GPU, or else the CPU, with a small random model "
        "or that of CONFIG.yaml; writes doctor-gpu.json and doctor-gpu.md",
    )
    doctor.add_argument(
        "--cluster",
        action="store_true",
        help="start the cluster of CONFIG.yaml (execution: ray), and time a sum over its ranks, sampling compared with "
        "the bare engine, an update, and a sync of the model; nothing is saved",
    )
    doctor.add_argument("overrides", nargs="*", metavar="key=value", help="such as ray.training_workers=8")


def _add_checks(commands: _Commands) -> None:
    for kind in ("loss", "advantage"):
        check = commands.add_parser(
            f"check-{kind}",
            help=f"the laws that your function of {kind}s satisfies",
            description="Import a function of tensors, from the current folder too, and call it: print which laws of "
            "rlprims.testing it satisfies, which it breaks, and programs that show it.",
        )
        check.add_argument("function", metavar="package.module:function|FILE.py:function")
        names = "of its parameters the names in the vocabulary, or values: logp=log_probs,mask=response_mask,clip=0.2"
        check.add_argument("--arguments", default="", metavar="ITS=OURS,...", help=names)
