"""Scoring of texts: one by one (:func:`naive`), by a verifier of lists (:func:`batch`), in worker processes
(:class:`rlprims.rewards.pool.Pool`), or by a server (:func:`rlprims.rewards.remote.remote`).

All take the same data and return :class:`Scores`. If a row fails, only that row has no score, and the cause is counted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlprims.rewards._outcome import Failure, Outcome, Wants, call, raised, read, wants

__all__ = ["Cause", "Failure", "Scores", "batch", "naive"]


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


def naive(
    verifier: Callable[..., Any],
    responses: Sequence[str],
    answers: Sequence[Any],
    extra: Mapping[str, Sequence[Any]] | None = None,
    **options: Any,
) -> Scores:
    """Score each row by ``verifier(response, answer, **options)`` in this process, without limits of time or memory.

    The verifier gets the columns of ``extra`` that it has as parameters. A column for a parameter with a default may be
    missing, or None in a row; ``**kwargs`` gets all other columns.

    Raises:
        ValueError: columns of different lengths, or one that the verifier needs is missing.

    >>> from rlprims.rewards import verifiers
    >>> naive(verifiers.gsm8k, ["#### 72", "71"], ["72", "72"]).scores
    tensor([1., 0.])
    >>> naive(lambda response, answer: {"1": 1.0}[response], ["1", "2"], ["", ""]).failures[1]
    Failure(cause='raised KeyError', detail="'2'")
    """
    rows = to_rows(verifier, responses, answers, extra)
    return to_scores([call(verifier, row.arguments, {**row.named, **options}) for row in rows])


def batch(
    verifier: Callable[..., Any],
    responses: Sequence[str],
    answers: Sequence[Any],
    extra: Mapping[str, Sequence[Any]] | None = None,
    **options: Any,
) -> Scores:
    """Score all rows by one call, ``verifier(responses, answers, **options)``, that returns a list of results.

    If it raises, or does not return one result per row, no row has a score, because results cannot be assigned to rows.

    >>> batch(lambda responses, answers: [len(r) for r in responses], ["a", "bc"], ["", ""]).scores
    tensor([1., 2.])
    """
    arguments, named = to_columns(wants(verifier), responses, answers, extra)
    if not responses:
        return to_scores([])
    try:
        return to_scores(read_all(verifier(*arguments, **named, **options), len(responses)))
    except Exception as error:
        return to_scores([raised(error)] * len(responses))


class Row(NamedTuple):
    """The arguments of a verifier for one row."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]


def to_rows(
    verifier: Callable[..., Any] | Wants,
    responses: Sequence[str],
    answers: Sequence[Any],
    extra: Mapping[str, Sequence[Any]] | None = None,
) -> list[Row]:
    """The arguments row by row. If an optional column is None in a row, the verifier's default is used."""
    wanted = verifier if isinstance(verifier, Wants) else wants(verifier)
    arguments, named = to_columns(wanted, responses, answers, extra)
    rows = zip(*arguments, strict=True)
    if not named:
        return [Row(row, {}) for row in rows]
    values = zip(*named.values(), strict=True)
    optional = set(wanted.optional)
    return [
        Row(row, {n: v for n, v in zip(named, row_values, strict=True) if v is not None or n not in optional})
        for row, row_values in zip(rows, values, strict=True)
    ]


def to_columns(
    wanted: Wants, responses: Sequence[str], answers: Sequence[Any], extra: Mapping[str, Sequence[Any]] | None
) -> tuple[list[list[Any]], dict[str, list[Any]]]:
    """The columns that a verifier gets by position and by name.

    Raises:
        ValueError: columns of different lengths; a required column is missing.
    """
    available = {"answer": answers, **(extra or {})} if len(wanted.positional) < 2 else extra or {}
    named = {name: list(available[name]) for name in wanted.of(available)}
    for name, column in {"answers": answers, **named}.items():
        if len(column) != len(responses):
            raise ValueError(f"{name} has {len(column)} rows and responses has {len(responses)}, expected as many")
    return [list(responses), list(answers)][: len(wanted.positional)], named


def read_all(results: Any, rows: int) -> list[Outcome]:
    """The outcomes of one call for several rows. All rows fail if the number of results is wrong."""
    if len(results) != rows:
        return [Failure("wrong length", f"{len(results)} results for {rows} rows")] * rows
    return [read(result) for result in results]


def to_scores(outcomes: Sequence[Outcome]) -> Scores:
    """The outcomes of all rows as columns."""
    numbers = [{} if isinstance(outcome, Failure) else outcome for outcome in outcomes]
    names = sorted({name for row in numbers for name in row} - {"score"})

    def column(name: str) -> Tensor:
        return torch.tensor([row.get(name, math.nan) for row in numbers], dtype=torch.float32)

    failures = [outcome if isinstance(outcome, Failure) else None for outcome in outcomes]
    return Scores(column("score"), {name: column(name) for name in names}, failures)
