"""Texts to :class:`Scores`: one by one (:func:`naive`), by a verifier of lists (:func:`batch`), in killable processes
(:class:`rlprims.rewards.pool.Pool`), or by a server (:func:`rlprims.rewards.remote.remote`).

All take the same data and return the same; whatever goes wrong with a row costs that row's score and is counted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlprims.rewards._outcome import Failure, Outcome, call, columns_of, raised, read

__all__ = ["Cause", "Failure", "Scores", "batch", "naive"]


class Cause(NamedTuple):
    """How many rows failed so, and the first of them."""

    rows: int
    first: int
    detail: str


class Scores(NamedTuple):
    """What B responses scored."""

    scores: Tensor
    """float32 (B,); NaN where there is none."""
    columns: dict[str, Tensor]
    """float32 (B,) each: every other number that the verifier returned; NaN where it did not."""
    failures: list[Failure | None]
    """Why a row has no score."""

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
    """Each row by ``verifier(response, answer, **options)``, here and now: quick, and without any limit.

    Columns of ``extra`` that the verifier names as parameters are given to it.

    Raises:
        ValueError: columns of different lengths, or one that the verifier needs is missing.

    >>> from rlprims.rewards import verifiers
    >>> naive(verifiers.gsm8k, ["#### 72", "71"], ["72", "72"]).scores
    tensor([1., 0.])
    >>> naive(lambda response, answer: {"1": 1.0}[response], ["1", "2"], ["", ""]).failures[1]
    Failure(cause='raised KeyError', detail="'2'")
    """
    rows = to_rows(verifier, responses, answers, extra)
    return to_scores([call(verifier, row, options) for row in rows])


def batch(
    verifier: Callable[..., Any],
    responses: Sequence[str],
    answers: Sequence[Any],
    extra: Mapping[str, Sequence[Any]] | None = None,
    **options: Any,
) -> Scores:
    """All rows by one call, ``verifier(responses, answers, **options)``, that returns a result for each.

    If it raises, or returns anything but one result for each row, no row has a score: there is no telling whose the
    results are.

    >>> batch(lambda responses, answers: [len(r) for r in responses], ["a", "bc"], ["", ""]).scores
    tensor([1., 2.])
    """
    rows = to_rows(verifier, responses, answers, extra)
    if not rows:
        return to_scores([])
    try:
        results = verifier(*map(list, zip(*rows, strict=True)), **options)
        if len(results) != len(rows):
            wrong = Failure("wrong length", f"{len(results)} results for {len(rows)} rows")
            return to_scores([wrong] * len(rows))
        return to_scores([read(result) for result in results])
    except Exception as error:
        return to_scores([raised(error)] * len(rows))


def to_rows(
    verifier: Callable[..., Any] | Sequence[str],
    responses: Sequence[str],
    answers: Sequence[Any],
    extra: Mapping[str, Sequence[Any]] | None = None,
) -> list[tuple[Any, ...]]:
    """The verifier's positional arguments, row by row; of ``extra`` the columns that it names."""
    extra = extra or {}
    names = columns_of(verifier) if callable(verifier) else verifier
    if missing := [name for name in names if name not in extra]:
        raise ValueError(f"the verifier needs the columns {missing}; extra has {sorted(extra)}")
    columns = {"answers": answers, **{name: extra[name] for name in names}}
    for name, column in columns.items():
        if len(column) != len(responses):
            raise ValueError(f"{name} has {len(column)} rows and responses has {len(responses)}: give one for each")
    return list(zip(responses, *columns.values(), strict=True))


def to_scores(outcomes: Sequence[Outcome]) -> Scores:
    """One outcome a row, side by side."""
    numbers = [{} if isinstance(outcome, Failure) else outcome for outcome in outcomes]
    names = sorted({name for row in numbers for name in row} - {"score"})

    def column(name: str) -> Tensor:
        return torch.tensor([row.get(name, math.nan) for row in numbers], dtype=torch.float32)

    failures = [outcome if isinstance(outcome, Failure) else None for outcome in outcomes]
    return Scores(column("score"), {name: column(name) for name in names}, failures)
