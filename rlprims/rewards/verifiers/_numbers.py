"""Exact reading of written numbers, in time linear in the text."""

import re
from collections import deque
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import islice

from rlprims.rewards.verifiers._units import SCALES

_DIGITS = r"\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
"""A comma has three digits after it: 1,200 is one number, 1,2 are two."""
_NUMBER = re.compile(rf"[-+]?{_DIGITS}")
_PLAIN = re.compile(rf"[-+]?{_DIGITS}(?:[eE][-+]?\d{{1,3}})?")
_POWER = r"\s*(?:\\times|\\cdot|[×*·])\s*10\s*\^\s*\{?([-+]?\d{1,3})(?!\d)\}?"
_VALUE = re.compile(
    rf"([-+]?)(?:\\[dt]?frac\s*\{{(\d{{1,99}})\}}\s*\{{(\d{{1,99}})\}}|({_DIGITS})(?:\s*/\s*(\d{{1,99}})|([eE][-+]?\d{{1,3}})|{_POWER})?)"
)
"""A number in digits, a fraction of whole numbers, or a number in scientific notation."""
_SCALE = re.compile(rf"\s*(?:\\text\w*\{{\s*)?({'|'.join(SCALES)})\b", re.IGNORECASE)
_OPERATION = re.compile(r"\s*[-+*/^=×·!_%]")
_SENTENCE = re.compile(r"\.(?:\s|$)|,?\s(?:because|since)\s")
_MINUS = str.maketrans("−–", "--")
_LONGEST = 100


def last_number(text: str) -> Decimal | None:
    """The last number of the text: 72, 72.0, 1,234, $5, -3, .5."""
    last = deque(_NUMBER.finditer(text.translate(_MINUS)), maxlen=1)
    return _decimal(last[0].group()) if last else None


def last_value(text: str) -> Fraction | None:
    r"""The last value of the text: a number, 3/4, 1.5e-3, 4.5 \times 10^{33}, 2 million."""
    text = text.translate(_MINUS)
    last = deque(_VALUE.finditer(text), maxlen=1)
    return _value(last[0], text) if last else None


def only_value(text: str) -> Fraction | None:
    """The value in the first sentence of the text; None if it has two or none: ``7 or 8`` is no answer."""
    if len(text) <= _LONGEST and (number := plain_number(text.strip())) is not None:
        return Fraction(number)
    line = _SENTENCE.split(text.lstrip().partition("\n")[0].translate(_MINUS), maxsplit=1)[0]
    values = list(islice(_VALUE.finditer(line), 2))
    if len(values) != 1 or _OPERATION.match(line, values[0].end()):
        return None
    return _value(values[0], line)


@lru_cache(maxsize=1024)  # all responses of a group have the same answer
def gold_value(answer: str) -> Fraction | None:
    """The value of an answer: a number, or a whole GSM8K solution with the number after its mark; None: no value."""
    return only_value(marked(answer) or answer)


def marked(text: str) -> str | None:
    """The text after the last mark of GSM8K, ``####`` or ``A:``; None without a mark."""
    hashes = text.rfind("####")
    letter = text.rfind("A:", max(hashes, 0))
    return text[letter + 2 :] if letter >= 0 else text[hashes + 4 :] if hashes >= 0 else None


def plain_number(text: str) -> Decimal | None:
    """The number if the whole text is one, else None."""
    return _decimal(text) if len(text) <= _LONGEST and _PLAIN.fullmatch(text) else None


def _value(found: re.Match[str], text: str) -> Fraction | None:
    sign, over, under, digits, divisor, exponent, power = found.groups()
    number = _decimal(digits + (exponent or "")) if digits else Decimal(over)
    below = int(under or divisor or 1)
    if number is None or below == 0:
        return None
    scale = _SCALE.match(text, found.end())
    factor = SCALES[scale.group(1).lower()] if scale else 1
    value = Fraction(number) / below * Fraction(10) ** int(power or 0) * factor
    return -value if sign == "-" else value


def _decimal(text: str) -> Decimal | None:
    return Decimal(text.replace(",", "").replace("$", "")) if len(text) <= _LONGEST else None
