"""The outcome of scoring one row: its numbers, or a failure. This module calls the verifiers."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeAlias

_LONGEST_DETAIL = 500


class Failure(NamedTuple):
    """The reason that a row has no score. Failures are counted by ``cause``; ``detail`` is text for a person."""

    cause: str
    detail: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else self.cause


Outcome: TypeAlias = dict[str, float] | Failure
"""Numbers by name, ``score`` among them and finite; or a failure."""


def call(verifier: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]) -> Outcome:
    """The verifier's outcome on one row. An exception becomes a failure of that row; interrupts are raised."""
    try:
        return read(verifier(*arguments, **options))
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the timeouts of some libraries are not a subclass of Exception
        return raised(error)


def raised(error: BaseException) -> Failure:
    """The failure of an exception. Errors of servers and judges have a text ``cause``, which is used."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, str):
        return Failure(cause, str(getattr(error, "detail", error))[:_LONGEST_DETAIL])
    return Failure(f"raised {type(error).__name__}", str(error)[:_LONGEST_DETAIL])


def read(result: Any) -> Outcome:
    """The outcome of a result: a number, or a mapping with ``score``. Other values than numbers are left out."""
    numbers = result if isinstance(result, (dict, Mapping)) else {"score": result}
    if "score" not in numbers:
        return Failure("returned no score", f"only {sorted(map(str, numbers))}"[:_LONGEST_DETAIL])
    values = {str(name): value if type(value) is float else _number(value) for name, value in numbers.items()}
    score = values["score"]
    if score is None:
        kind = type(numbers["score"]).__name__
        return Failure(f"returned {'None' if kind == 'NoneType' else kind}", repr(numbers["score"])[:_LONGEST_DETAIL])
    if not math.isfinite(score):
        return Failure(f"returned {score}", "")
    return {name: value for name, value in values.items() if value is not None}


class Wants(NamedTuple):
    """The data that a function needs, by its signature. Parameters after ``*`` are options, not data."""

    positional: tuple[str, ...]
    """The names of its parameters for the response and, if it has one, for the answer."""
    required: tuple[str, ...]
    """The columns that it must get."""
    optional: tuple[str, ...]
    """The columns for parameters with a default."""
    rest: bool
    """Whether it has ``**kwargs`` and gets all other columns."""

    def of(self, available: Iterable[str]) -> list[str]:
        """The columns to pass to the function.

        Raises:
            ValueError: a required column is missing.
        """
        names = list(available)
        if missing := [name for name in self.required if name not in names]:
            near = {name: get_close_matches(name, names, n=1) for name in missing}
            hints = "".join(f"; did you mean {found[0]!r}?" for found in near.values() if found)
            raise ValueError(f"the verifier needs the columns {missing}; extra has {sorted(names)}{hints}")
        optional = [name for name in names if name in self.optional or self.rest]
        return [*self.required, *(name for name in optional if name not in self.required + self.positional)]


def wants(function: Callable[..., Any]) -> Wants:
    """The data that a function needs. The second parameter is the answer, or a column if it has a default and another
    name."""
    parameters = list(inspect.signature(function).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return Wants(("", ""), (), (), rest)
    first = 2 if len(named) > 1 and (named[1].default is inspect.Parameter.empty or named[1].name == "answer") else 1
    after = [p for p in named[first:] if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = tuple(p.name for p in after if p.default is p.empty)
    optional = tuple(p.name for p in after if p.default is not p.empty)
    return Wants(tuple(p.name for p in named[:first]), required, optional, rest)


def plain(value: Any) -> Any:
    """Convert numbers and arrays of numpy and torch to values of JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
