"""The reasons why a response or a turn ended. A batch holds them as codes; files and pages hold their names."""

from enum import IntEnum
from typing import Literal, TypeAlias

EndedName: TypeAlias = Literal["stop", "length", "turns", "context", "parse_error", "timeout", "error", "aborted"]


class Ended(IntEnum):
    """Why a response ended. ``ended`` (B,) of a batch holds the codes, as int8; JSON and pages hold the names.

    >>> Ended.LENGTH.label, int(Ended.LENGTH), Ended.from_label("parse_error")
    ('length', 1, <Ended.PARSE_ERROR: 4>)
    """

    STOP = 0
    """The policy ended it: by the end token, or by a stop text."""
    LENGTH = 1
    """It reached the limit of response tokens."""
    TURNS = 2
    """It reached the limit of turns."""
    CONTEXT = 3
    """The model's context window was full."""
    PARSE_ERROR = 4
    """The policy's text could not be parsed, such as a malformed tool call."""
    TIMEOUT = 5
    """The environment or a tool took too long."""
    ERROR = 6
    """The environment or the engine failed."""
    ABORTED = 7
    """It was stopped from outside before it was complete."""

    @property
    def label(self) -> str:
        """The name in files and on pages."""
        return self.name.lower()

    @classmethod
    def from_label(cls, label: str) -> "Ended":
        """The reason that has this name; ``ValueError`` lists the known names if there is none."""
        if label not in LABELS:
            raise ValueError(f"ended is {label!r}, expected {' or '.join(map(repr, LABELS))}")
        return cls(LABELS.index(label))


LABELS = tuple(reason.label for reason in Ended)
"""All names, in the order of the codes."""

CUT_OFF: tuple[EndedName, ...] = ("length", "turns", "context", "parse_error", "timeout", "error", "aborted")
"""Every reason except ``stop``."""
