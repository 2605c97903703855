"""What a call of a reward function came back with: for each row its numbers, or a failure."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rlprims.rewards._columns import plain

_LONGEST_DETAIL = 500


class Failure(NamedTuple):
    """The reason that a row has no score. Failures are counted by ``cause``; ``detail`` is text for a person."""

    cause: str
    detail: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else self.cause


Outcome: TypeAlias = dict[str, float] | Failure
"""Numbers by name, ``score`` among them and finite; or a failure."""


class Cause(NamedTuple):
    """The number of rows that failed for a cause, and the first of them."""

    rows: int
    first: int
    detail: str


class Scores(NamedTuple):
    """The scores of B responses."""

    scores: Tensor
    """float32 (B,); NaN for rows without a score."""
    columns: dict[str, Tensor]
    """float32 (B,) each: every other number that the verifier returned; NaN for rows without it."""
    failures: list[Failure | None]
    """The failures of rows without a score."""

    @property
    def causes(self) -> dict[str, Cause]:
        """The failures counted by cause, each with an example."""
        found: dict[str, Cause] = {}
        for row, failure in enumerate(self.failures):
            if failure is not None:
                cause = found.get(failure.cause, Cause(0, row, failure.detail))
                found[failure.cause] = cause._replace(rows=cause.rows + 1)
        return found


def outcomes(
    function: Callable[..., Any], arguments: Sequence[Any], named: Mapping[str, Any], rows: int | None = None
) -> list[Outcome]:
    """Call a function and read what it returns. An exception fails all rows of the call; an interrupt is raised.

    ``rows`` is the number of results that the function returns as a list; None: it returns the result of one row.
    """
    try:
        return read(function(*arguments, **named), rows)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the timeouts of some libraries are not a subclass of Exception
        return [raised(error)] * (1 if rows is None else rows)


def read(result: Any, rows: int | None = None) -> list[Outcome]:
    """The outcomes in the result of a call, for its number of rows. All fail if the number of results is another."""
    if rows is None:
        return [read_row(result)]
    if len(result) != rows:
        return [Failure("wrong length", f"{len(result)} results for {rows} rows")] * rows
    return [read_row(row) for row in result]


def read_row(result: Any) -> Outcome:
    """The outcome of a number, a mapping with ``score``, or an exception. Other values than numbers are left out."""
    if isinstance(result, Exception):
        return raised(result)
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


def raised(error: BaseException) -> Failure:
    """The failure of an exception. Errors of servers and judges have a text ``cause``, which is used."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, str):
        return Failure(cause, str(getattr(error, "detail", error))[:_LONGEST_DETAIL])
    return Failure(f"raised {type(error).__name__}", str(error)[:_LONGEST_DETAIL])


def encoded(values: Any) -> bytes | Failure:
    """The values as JSON, or why they are not JSON. Numbers and arrays of numpy and torch become values of JSON."""
    try:
        return json.dumps(values, default=plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return Failure("not JSON", str(error))


def to_scores(found: Sequence[Outcome]) -> Scores:
    """The outcomes of all rows as columns."""
    numbers = [{} if isinstance(outcome, Failure) else outcome for outcome in found]
    names = sorted({name for row in numbers for name in row} - {"score"})

    def column(name: str) -> Tensor:
        return torch.tensor([row.get(name, math.nan) for row in numbers], dtype=torch.float32)

    failures = [outcome if isinstance(outcome, Failure) else None for outcome in found]
    return Scores(column("score"), {name: column(name) for name in names}, failures)


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
