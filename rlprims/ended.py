"""Why a response, or a turn of it, ended: a code in a batch, its name in files and on pages."""

from enum import IntEnum
from typing import Literal, TypeAlias

EndedName: TypeAlias = Literal["stop", "length", "turns", "context", "parse_error", "timeout", "error", "aborted"]


class Ended(IntEnum):
    """Why a response ended. ``ended`` (B,) of a batch holds the codes, as int8; JSON and pages hold the names.

    >>> Ended.LENGTH.label, int(Ended.LENGTH), Ended.of("parse_error")
    ('length', 1, <Ended.PARSE_ERROR: 4>)
    """

    STOP = 0
    """By itself: the end token, or a stop text."""
    LENGTH = 1
    """At the limit of a response's tokens."""
    TURNS = 2
    """At the limit of turns."""
    CONTEXT = 3
    """The model's window was full."""
    PARSE_ERROR = 4
    """What the policy wrote could not be read, such as a malformed tool call."""
    TIMEOUT = 5
    """The environment or a tool took too long."""
    ERROR = 6
    """The environment or the engine failed."""
    ABORTED = 7
    """From outside, before it was done."""

    @property
    def label(self) -> str:
        """The name in files and on pages."""
        return self.name.lower()

    @classmethod
    def of(cls, label: str) -> "Ended":
        """The reason of a name.

        Raises:
            ValueError: no reason has the name; it lists those that there are.
        """
        if label not in LABELS:
            raise ValueError(f"{label!r} is no reason to end, expected {' or '.join(map(repr, LABELS))}")
        return cls(LABELS.index(label))


LABELS = tuple(reason.label for reason in Ended)
"""All names, in the order of the codes."""

CUT_OFF: tuple[EndedName, ...] = ("length", "turns", "context", "parse_error", "timeout", "error", "aborted")
"""Every reason but ``stop``."""
