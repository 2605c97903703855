"""Comparison of an output with the expected output, as texts or as values."""

import math
from typing import Any, Literal, TypeAlias

Compare: TypeAlias = Literal["lines", "tokens", "floats"]


def same_text(output: str, expected: str, compare: Compare, tolerance: float) -> bool:
    """Whether two texts are equal: in lines, up to space at their ends; in words; or in words, numbers nearly."""
    if compare == "lines":
        return _lines(output) == _lines(expected)
    words, expected_words = output.split(), expected.split()
    if compare == "tokens" or len(words) != len(expected_words):
        return words == expected_words
    pairs = zip(words, expected_words, strict=True)
    return all(a == b or _is_close(_number(a), _number(b), tolerance) for a, b in pairs)


def same_value(value: Any, expected: Any, compare: Compare, tolerance: float) -> bool:
    """Whether two values are equal as JSON, where a tuple is a list. x equals [x]: APPS and TACO wrap some values."""
    value = _as_json(value)
    wrapped = isinstance(expected, list) and len(expected) == 1
    return _same(value, expected, compare, tolerance) or (wrapped and _same(value, expected[0], compare, tolerance))


def _same(value: Any, expected: Any, compare: Compare, tolerance: float) -> bool:
    if isinstance(value, list) and isinstance(expected, list):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(_same(a, b, compare, tolerance) for a, b in pairs)
    if isinstance(value, dict) and isinstance(expected, dict):
        same_keys = value.keys() == expected.keys()
        return same_keys and all(_same(value[key], expected[key], compare, tolerance) for key in value)
    if isinstance(value, str) and isinstance(expected, str) and compare != "lines":
        return same_text(value, expected, compare, tolerance)
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (value, expected))
    if compare == "floats" and numbers:
        return bool(value == expected) or _is_close(float(value), float(expected), tolerance)
    return isinstance(value, bool) == isinstance(expected, bool) and bool(value == expected)


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    if isinstance(value, dict):
        return {str(key): _as_json(part) for key, part in value.items()}
    return value


def _is_close(x: float, y: float, tolerance: float) -> bool:
    return math.isfinite(x) and math.isfinite(y) and abs(x - y) <= tolerance * max(1.0, abs(y))


def _number(word: str) -> float:
    """The word as a number; NaN if it is not one."""
    try:
        return math.nan if "_" in word else float(word)
    except ValueError:
        return math.nan


def _lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().split("\n")
