"""Errors of the disk in words: which path could not be written, and why."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rlprims.execution import ExecutionError


class CannotWrite(OSError, ValueError):
    """The disk is full, lost or read-only; the message has the path."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise :class:`CannotWrite` with ``path`` for an error of the disk in this block, also of a rank's disk."""
    try:
        yield
    except CannotWrite:
        raise
    except (OSError, SafetensorError, ExecutionError) as error:
        raise CannotWrite(f"cannot write {path}: {error}") from error
