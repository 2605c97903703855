"""The final expression of a response against the answer, as mathematics."""

import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlprims.rewards.verifiers import _expressions
from rlprims.rewards.verifiers._numbers import plain_number
from rlprims.rewards.verifiers._tags import answer_line, boxed, depth

_LONGEST, _DEEPEST = 1000, 8
_SPACING = re.compile(r"\\[,;:! ]|\\q?quad\b|~|\s+")
_FRACTION = re.compile(r"([-+]?)(?:\\frac(?:\{([-+]?\d{1,100})\}\{(\d{1,100})\}|(\d)(\d))|(\d{1,100})/(\d{1,100}))")
_POWER = re.compile(r"(?:([-+]?[^\\*e^]{1,100}?)(?:\\times|\\cdot|\*)|([-+]?))10\^(?:\{([-+]?\d{1,3})\}|(\d))")
_RELATION = re.compile(r"[<>,;]|\b(?:or|and)\b|\\(?:leq?|geq?|lt|gt|neq?|in|cup|cap|pm|mp|to)\b")


def math(response: str, answer: str | float | list[str], *, final_phrase: bool = False) -> dict[str, float]:
    r"""1 if the response's final expression means what the answer's does: 1/2 and \frac12, sets, matrices.

    The final expression is what the last closed ``\boxed{...}`` holds, else the rest of the last ``Answer:`` line (the
    form that DAPO asks for), else with ``final_phrase`` what "The final answer is ..." says (Minerva); without any the
    score is 0. The answer is an expression, or a solution with a box.

    Equal texts and equal numbers are decided here; all else by math-verify and sympy (extra ``rewards``), which know no
    bound: ``10^{10^{10}}`` would be computed. An expression above 1,000 characters or 8 nested brackets that is not the
    answer's text is wrong unread, and the rest belongs into :class:`rlprims.rewards.pool.Pool`, whose limits end it.

    A letter outside a text is a variable and no unit, so that 6m is not 6 and ``6\\text{ m}`` is. Each side of what is
    said to be equal must be the answer: ``6=5`` is not 5. ``a \\approx b`` is a if b rounds it, else nothing; and what
    takes itself back, as ``5 \\text{ (or 6)}``, is wrong.

    Args:
        response: what the model wrote.
        answer: an expression, or a solution with a box.
        final_phrase: also read "The final answer is ...".

    Raises:
        ValueError: the answer cannot be read: a wrong gold must not score 0, nor 1.

    >>> math(r"so it is $\boxed{\frac{3}{4}}$.", r"\dfrac{3}{4}")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    candidate = boxed(response)
    candidate = candidate if candidate is not None else answer_line(response)
    if candidate is None and final_phrase:
        candidate = _expressions.final_phrase(response)
    if candidate is None:
        return {"score": 0.0, "acc": 0.0, "format": 0.0}
    if isinstance(answer, list) and len(answer) == 1:  # OlympiadBench
        answer = answer[0]
    if not isinstance(answer, str | int | float):
        raise ValueError(f"expected one expression as the answer, got {answer!r}; use a text")
    gold = str(answer)
    inner = boxed(gold)
    is_correct = _equal(inner if inner is not None else gold, candidate)
    return {"score": float(is_correct), "acc": float(is_correct), "format": 1.0}


def _equal(gold: str, candidate: str) -> bool:
    if not gold.strip():
        raise ValueError("answer is empty")
    if gold == candidate:
        return True
    if len(candidate) > _LONGEST or depth(candidate) > _DEEPEST or not candidate.strip():
        return bool(candidate.strip()) and _plain.__wrapped__(gold) == _plain.__wrapped__(candidate)
    if _plain(gold) == _plain(candidate):
        return True
    if _expressions.is_hedged(candidate) and not _expressions.is_hedged(gold):
        return False
    exact, *rounded = candidate.replace("≈", r"\approx").split(r"\approx")
    if rounded and r"\approx" not in gold:
        if _expressions.is_name(exact):
            return _equal(gold, r"\approx".join(rounded))
        return len(rounded) == 1 and _rounds(exact, rounded[0]) and _equal(gold, exact)
    names = {_expressions.name_defined(text) for text in (gold, candidate)} - {None}
    if len(names) == 1 and not any(_RELATION.search(text) for text in (gold, candidate)):
        golds, candidates = (list(_expressions.sides(text)) for text in (gold, candidate))
        if len(golds) == 1:
            return all(_means(golds[0], side) for side in candidates)
    if not names and "=" not in gold and len(candidates := _expressions.split_outside(candidate, "=")) > 1:
        return all(_means(gold, side) for side in candidates)
    return _means(gold, candidate)


def _means(gold: str, candidate: str) -> bool:
    plain_gold, plain_candidate = _plain(gold), _plain(candidate)
    if plain_gold == plain_candidate:
        return True
    expected_numbers, numbers = _numbers(plain_gold), _numbers(plain_candidate)
    if expected_numbers and numbers:
        return not expected_numbers.isdisjoint(numbers)
    from math_verify import verify

    # A letter of a unit that the other side sets as text is no variable.
    units = _expressions.letters(candidate) <= _expressions.unit_letters(gold)
    gold_units = not _expressions.letters(gold) - _expressions.unit_letters(candidate)
    expected, found = _parse_gold(gold, gold_units), _parse(candidate, units)
    # The order matters: math-verify asks whether the second is an acceptable form of the first.
    return bool(verify(expected, found, timeout_seconds=None))


def _rounds(exact: str, rounded: str) -> bool:
    """Whether a decimal is the rounded value of an expression."""
    number = plain_number(_plain(rounded))
    if number is None:
        return False
    values = _numbers(_plain(exact))
    if not values:
        found = _parse(exact, False)
        value = found[0].evalf() if found and hasattr(found[0], "evalf") else None
        if value is None or not getattr(value, "is_Float", False):
            return False
        values = frozenset({Fraction(str(value))})
    digits = -int(number.as_tuple().exponent)
    return any(abs(value - Fraction(number)) * 2 <= Fraction(10) ** -digits for value in values)


@lru_cache(maxsize=1024)  # a group has one gold, and few answers
def _plain(text: str) -> str:
    for other, one in _expressions.SAME:
        text = text.replace(other, one)
    return _SPACING.sub("", _expressions.words_unwrapped(text)).rstrip(".")


@lru_cache(maxsize=1024)
def _numbers(plain: str) -> frozenset[Fraction]:
    """What a number or a fraction of integers can mean: 50% is 50 and 0.5, as datasets write either."""
    bare = plain.removesuffix("%").removesuffix("\\")
    if match := _POWER.fullmatch(bare.removesuffix(r"^\circ")):
        factor_text, sign, *exponents = match.groups()
        factors = _numbers(factor_text) if factor_text is not None else frozenset({Fraction(-1 if sign == "-" else 1)})
        return frozenset(factor * Fraction(10) ** int(exponents[0] or exponents[1]) for factor in factors)
    if match := _FRACTION.fullmatch(bare):
        sign, *parts = (part for part in match.groups() if part is not None)
        above, below = map(int, parts)
        return frozenset({Fraction(-above if sign == "-" else above, below)} if below else ())
    number = plain_number(bare.removesuffix(r"^\circ"))
    if number is None:
        return frozenset()
    return frozenset({Fraction(number)} if bare == plain else {Fraction(number), Fraction(number) / 100})


@lru_cache(maxsize=1024)  # a group has one
def _parse_gold(text: str, units: bool) -> Any:
    expected = _parse(text, units)
    if not expected:
        raise ValueError(f"answer={text!r} cannot be read as mathematics")
    return expected


def _parse(text: str, units: bool) -> Any:
    """``units``: letters and words at the end are units, and are left out."""
    import math_verify

    # Its own time limit is an alarm, which works in the main thread only and cannot end a long computation in C.
    math_verify.parser.TIMEOUT_WARNING_SHOWN = math_verify.grader.TIMEOUT_WARNING_SHOWN = True
    config = math_verify.LatexExtractionConfig()
    if not units:
        config = replace(config, normalization_config=replace(config.normalization_config, units=False))
    return math_verify.parse(f"\\boxed{{{_expressions.for_parser(text, units)}}}", [config], parsing_timeout=None)
