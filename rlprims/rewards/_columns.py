"""The columns of the data that a function gets: by the names of its parameters, for one row or for several."""

import base64
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from rlprims import _imports
from rlprims._near import near


class Data(NamedTuple):
    """The responses of B rows, and the columns beside them."""

    responses: Sequence[str]
    answers: Sequence[Any]
    extra: Mapping[str, Sequence[Any]] | None = None
    group_ids: Sequence[Any] | None = None


class Bound(NamedTuple):
    """The arguments of one call, and the rows that it scores."""

    rows: Sequence[int]
    arguments: Sequence[Any]
    named: Mapping[str, Any]
    results: int | None = None
    """The length of the list that the call returns; None: it returns the result of one row."""


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

    def names_in(self, available: Iterable[str]) -> list[str]:
        """The columns to pass to the function.

        Raises:
            ValueError: a required column is missing.
        """
        names = list(available)
        if missing := [name for name in self.required if name not in names]:
            hints = "".join(f"; did you mean {meant!r}?" for name in missing if (meant := near(name, names)))
            raise ValueError(f"the verifier needs the columns {missing}; extra has {sorted(names)}{hints}")
        optional = [name for name in names if name in self.optional or self.rest]
        return [*self.required, *(name for name in optional if name not in self.required + self.positional)]


def wants(function: Callable[..., Any]) -> Wants:
    """The data that a function needs. Its second parameter is the answer, unless it has a default and another name."""
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


def by_row(wanted: Wants, data: Data, options: Mapping[str, Any]) -> list[Bound]:
    """The arguments of a call for each row. If an optional column is None in a row, the function's default is used."""
    arguments, named = _columns(wanted, data)
    rows = zip(*arguments, strict=True)
    if not named:
        return [Bound((row,), values, options) for row, values in enumerate(rows)]
    optional = set(wanted.optional)
    bound = []
    for row, (values, others) in enumerate(zip(rows, zip(*named.values(), strict=True), strict=True)):
        pairs = zip(named, others, strict=True)
        given = {name: value for name, value in pairs if value is not None or name not in optional}
        bound.append(Bound((row,), values, {**given, **options}))
    return bound


def by_rows(wanted: Wants, data: Data, groups: Iterable[Sequence[int]], options: Mapping[str, Any]) -> list[Bound]:
    """The arguments of a call for each group of rows: lists with an entry for each row."""
    arguments, named = _columns(wanted, data)
    bound = []
    for rows in groups:
        values = [[column[row] for row in rows] for column in arguments]
        given = {name: [column[row] for row in rows] for name, column in named.items()}
        bound.append(Bound(rows, values, {**given, **options}, len(rows)))
    return bound


def plain(value: Any) -> Any:
    """Convert numbers and arrays of numpy and torch to values of JSON, and bytes to base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _columns(wanted: Wants, data: Data) -> tuple[list[list[Any]], dict[str, list[Any]]]:
    """The columns that a function gets by position and by name.

    Raises:
        ValueError: columns of different lengths; a required column is missing.
    """
    extra = data.extra or {}
    available = {"answer": data.answers, **extra} if len(wanted.positional) < 2 else extra
    named = {name: list(available[name]) for name in wanted.names_in(available)}
    for name, column in {"answers": data.answers, **named}.items():
        if len(column) != len(data.responses):
            raise ValueError(f"{name} has {len(column)} rows and responses has {len(data.responses)}, expected as many")
    return [list(data.responses), list(data.answers)][: len(wanted.positional)], named


@cache
def imported(path: str) -> Callable[..., Any]:
    """The function at ``package.module.name`` or ``/folder/file.py:name``."""
    try:
        found: Callable[..., Any] = _imports.imported(path)
    except _imports.FileError:
        raise
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"cannot import {path!r} ({error}): write it as package.module.function") from None
    return found
