"""The arguments of the commands, which ``_arguments.json`` has in the words of ``argparse``."""

import argparse
import re
from pathlib import Path
from typing import NoReturn

from rlprims import __version__
from rlprims._json import beside
from rlprims._near import near

_TYPES = {"Path": Path, "int": int}
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
    for name, command in beside(__file__, "_arguments.json").items():
        of_command = commands.add_parser(name, help=command["help"], description=command["description"])
        for argument, options in command["arguments"].items():
            if "type" in options:
                options["type"] = _TYPES[options["type"]]
            if "help" in options:
                options["help"] = options["help"].format(resumable=", ".join(RESUMABLE))
            of_command.add_argument(argument, **options)
    return parser
