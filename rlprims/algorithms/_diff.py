"""The values of an algorithm by dotted name, and those in which two algorithms differ."""

from typing import Any

from pydantic import BaseModel

from rlprims.algorithms._algorithm import Algorithm, check_algorithm
from rlprims.algorithms._use import BoundFunction


def settings(algorithm: Algorithm) -> dict[str, Any]:
    """All values of an algorithm by dotted name, including defaults."""
    found: dict[str, Any] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, BoundFunction):
            found[f"{name}.fn"] = value.path
            found.update({f"{name}.{key}": v for key, v in sorted(value.hyperparameters.items())})
        elif isinstance(value, BaseModel):
            for field in type(value).model_fields:
                visit(f"{name}.{field}" if name else field, getattr(value, field))
        elif isinstance(value, tuple):
            for i, part in enumerate(value):
                visit(f"{name}.{i}", part)
        else:
            found[name] = value

    check_algorithm(algorithm)
    visit("", algorithm)
    return found


def diff(a: Algorithm, b: Algorithm) -> dict[str, tuple[Any, Any]]:
    """The values that differ, by dotted name; None if one of the algorithms has no such value.

    >>> from rlprims import algorithms
    >>> diff(algorithms.grpo(), algorithms.grpo().replace(group_size=16))
    {'group_size': (64, 16)}
    """
    settings_a, settings_b = settings(a), settings(b)
    pairs = {name: (settings_a.get(name), settings_b.get(name)) for name in settings_a | settings_b}
    return {name: (x, y) for name, (x, y) in pairs.items() if x != y}
