"""Errors of the disk, with the path that could not be written and the reason."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rlprims.execution import ExecutionError


class CannotWrite(OSError, ValueError):
    """The disk is full, lost or read-only; the message has the path."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise :class:`CannotWrite` with ``path`` if the disk, or the disk of a rank, fails in this block."""
    try:
        yield
    except CannotWrite:
        raise
    except (OSError, SafetensorError, ExecutionError) as error:
        raise CannotWrite(f"cannot write {path}: {error}") from error
