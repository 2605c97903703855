"""Exact reading of written numbers, in time linear in the text."""

import re
from collections import deque
from decimal import Decimal, InvalidOperation

_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(?:\.\d+)?|[-+]?\$?\.\d+")
_EXPONENT = r"(?:[eE][-+]?\d{1,3})?"
_SCIENTIFIC = re.compile("|".join(part + _EXPONENT for part in _NUMBER.pattern.split("|")))
_PLAIN = re.compile(r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)" + _EXPONENT)
_LONGEST = 100


def first_number(text: str) -> Decimal | None:
    """The first number of the text: 72, 72.0, 1,234, $5, -3, .5."""
    match = _NUMBER.search(text)
    return _decimal(match.group()) if match else None


def last_number(text: str, *, scientific: bool = False) -> Decimal | None:
    """The last number of the text; ``scientific`` also reads 1.5e-3."""
    last = deque((_SCIENTIFIC if scientific else _NUMBER).finditer(text), maxlen=1)
    return _decimal(last[0].group()) if last else None


def plain_number(text: str) -> Decimal | None:
    """The number if the whole text is one, else None; 1,200 is a number, 1,2 is not."""
    return _decimal(text) if len(text) <= _LONGEST and _PLAIN.fullmatch(text) else None


def _decimal(text: str) -> Decimal | None:
    if len(text) > _LONGEST:
        return None
    try:
        return Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None
