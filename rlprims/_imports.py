"""Imports of large packages without garbage collections."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection within the block.

    What an import makes stays, and each collection walks through all of it: a fifth of the CPU seconds in which torch,
    tensordict and transformers are imported, in every rank, engine and command.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
