"""Import of functions by their paths."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def imported(path: str) -> Callable[..., Any]:
    """The function at ``package.module.name``."""
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"cannot import {path!r} ({error}): write it as package.module.function") from None
    return found
