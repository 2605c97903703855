"""See :func:`math`."""

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlprims.rewards.verifiers._numbers import plain_number
from rlprims.rewards.verifiers._tags import answer_line, boxed, depth

_LONGEST, _DEEPEST = 1000, 8
_SPACING = re.compile(r"\\[,;:! ]|\\q?quad\b|~|\s+")
_FRACTION = re.compile(r"([-+]?)(?:\\frac(?:\{([-+]?\d{1,100})\}\{(\d{1,100})\}|(\d)(\d))|(\d{1,100})/(\d{1,100}))")
_SAME = ((r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\left", ""), (r"\right", ""), (r"\$", ""), ("$", ""))


def math(response: str, answer: str) -> dict[str, float]:
    r"""1 if the response's final expression means what the answer's does: 1/2 and \frac12, sets, matrices.

    The final expression is what the last closed ``\boxed{...}`` holds, else the rest of the last ``Answer:`` line (the
    form that DAPO asks for); without either the score is 0. The answer is an expression, or a solution with a box.

    Equal texts and equal numbers are decided here; all else by math-verify and sympy (extra ``rewards``), which know no
    bound: ``10^{10^{10}}`` would be computed. An expression above 1,000 characters or 8 nested brackets is wrong
    unread, and the rest belongs into :class:`rlprims.rewards.pool.Pool`, whose limits end it.

    Raises:
        ValueError: the answer cannot be read: a wrong gold must not score 0, nor 1.

    >>> math(r"so it is $\boxed{\frac{3}{4}}$.", r"\dfrac{3}{4}")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    said = boxed(response)
    said = said if said is not None else answer_line(response)
    if said is None:
        return {"score": 0.0, "acc": 0.0, "format": 0.0}
    inner = boxed(answer)
    right = _equal(inner if inner is not None else answer, said)
    return {"score": float(right), "acc": float(right), "format": 1.0}


def _equal(gold: str, said: str) -> bool:
    if not gold.strip():
        raise ValueError("answer is empty")
    if len(said) > _LONGEST or depth(said) > _DEEPEST or not said.strip():
        return False
    plain_gold, plain_said = _plain(gold), _plain(said)
    if plain_gold == plain_said:
        return True
    expected_numbers, numbers = _numbers(plain_gold), _numbers(plain_said)
    if expected_numbers and numbers:
        return not expected_numbers.isdisjoint(numbers)
    from math_verify import verify

    expected = _parse_gold(gold)
    # The order matters: math-verify asks whether the second is an acceptable form of the first.
    return bool(verify(expected, _parse(said), timeout_seconds=None))


@lru_cache(maxsize=1024)  # a group has one gold, and few answers
def _plain(text: str) -> str:
    for other, one in _SAME:
        text = text.replace(other, one)
    return _SPACING.sub("", text).rstrip(".")


@lru_cache(maxsize=1024)
def _numbers(plain: str) -> frozenset[Fraction]:
    """What a number or a fraction of integers can mean: 50% is 50 and 0.5, as datasets write either."""
    bare = plain.removesuffix("%").removesuffix("\\")
    if match := _FRACTION.fullmatch(bare):
        sign, *parts = (part for part in match.groups() if part is not None)
        above, below = map(int, parts)
        return frozenset({Fraction(-above if sign == "-" else above, below)} if below else ())
    number = plain_number(bare)
    if number is None:
        return frozenset()
    return frozenset({Fraction(number)} if bare == plain else {Fraction(number), Fraction(number) / 100})


@lru_cache(maxsize=1024)  # a group has one
def _parse_gold(text: str) -> Any:
    expected = _parse(text)
    if not expected:
        raise ValueError(f"answer={text!r} cannot be read as mathematics")
    return expected


def _parse(text: str) -> Any:
    import math_verify

    # Its own time limit is an alarm, which works in the main thread only and cannot end a long computation in C.
    math_verify.parser.TIMEOUT_WARNING_SHOWN = math_verify.grader.TIMEOUT_WARNING_SHOWN = True
    return math_verify.parse(f"\\boxed{{{text}}}", [math_verify.LatexExtractionConfig()], parsing_timeout=None)
