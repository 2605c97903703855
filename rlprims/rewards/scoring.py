"""Scoring of texts: one by one (:func:`naive`), by a verifier of lists (:func:`batch`), in worker processes
(:class:`rlprims.rewards.pool.Pool`).

All take the same data and return :class:`Scores`. If a row fails, only that row has no score, and the cause is counted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlprims.rewards._calls import Reward, run
from rlprims.rewards._columns import Data
from rlprims.rewards._outcome import Cause, Failure, Scores

__all__ = ["Cause", "Failure", "Scores", "batch", "naive"]


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
    return run([Reward(verifier, options=options)], Data(responses, answers, extra))[0]


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
    return run([Reward(verifier, per="batch", options=options)], Data(responses, answers, extra))[0]
