"""JSON whose numbers are the numbers of the text."""

import json
import math
from pathlib import Path
from typing import Any


def loads(text: str, *, constants: bool = True) -> Any:
    """The value of a JSON text. Integers keep all digits; ``constants`` allows NaN and Infinity.

    Raises:
        ValueError: not JSON, or a number that no float holds, such as 1e400, which ``json`` reads as infinity.

    >>> loads('{"a": 12345678901234567890}')
    {'a': 12345678901234567890}
    >>> loads("1e400")
    Traceback (most recent call last):
    ValueError: 1e400 is larger than any float: write it as text
    """
    how: dict[str, Any] = {} if constants else {"parse_constant": _refuse}
    try:
        return json.loads(text, parse_float=_finite, **how)
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is larger than any float: write it as text")
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON: expected a number")


def finite_number(value: Any) -> float | None:
    """The value as a float if it is a finite number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def beside(module: str, name: str) -> Any:
    """The value of the JSON file ``name`` beside a module, of which ``module`` is the ``__file__``."""
    return json.loads(Path(module).with_name(name).read_text(encoding="utf-8"))
