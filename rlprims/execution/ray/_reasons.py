"""The reason why a worker failed or died, as one line, and its traceback as plain text."""

import re
from itertools import dropwhile

from ray.exceptions import RayActorError, RayTaskError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PYDANTIC = re.compile(r" \[type=\w+, input_value=.*?, input_type=\w+\]\n    For further information visit \S+", re.S)
"""What pydantic writes behind each error of a ValidationError."""
_LONGEST = 1000
"""Characters of a reason. The traceback has the rest."""


def traceback_of(error: RayTaskError) -> str:
    """Return the worker's traceback, without the colours that Ray gives it."""
    return _COLOUR.sub("", str(error))


def cause_of(error: RayTaskError) -> str:
    """Return what a worker raised, on one line. ValueError and OSError are not named: their messages suffice."""
    text = _last_error(traceback_of(error))
    kind, colon, message = text.partition(": ")
    kind = kind.rpartition(".")[2]
    if isinstance(error.cause, ValueError | OSError) or kind == "ValidationError":
        kind, colon = "", ""
    message = _PYDANTIC.sub(";", message)
    message = re.sub(r"^(\S+)\n  ", r"\1: ", message, flags=re.M)  # the name of a field, and what is wrong with it
    message = re.sub(r"(validation errors? for \S+)\n", r"\1: ", message)
    line = " ".join((kind + colon + message).split()).rstrip(";")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def _last_error(traceback: str) -> str:
    """Return the lines below the last frame: the class of the error, and its message."""
    lines = traceback.splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    below = lines[frames[-1] + 1 :] if frames else lines
    return "\n".join(dropwhile(lambda line: line.startswith("    "), below))


def reason_of(error: RayActorError) -> str:
    """Return Ray's reason for the death of an actor: the first line, and the exception if there is one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
