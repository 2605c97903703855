"""Verifiers: (response, answer) to a dict with ``score`` and the columns that filters and logs may name.

A verifier is any function of two texts that returns a float or such a dict. These read only: nothing that a model
writes is evaluated, and none takes longer than linear time in its length.
"""

import re
from collections import deque
from decimal import Decimal, InvalidOperation

_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(?:\.\d+)?|[-+]?\$?\.\d+")
_LONGEST_NUMBER = 100


def tagged_answer(response: str, answer: str, *, tag: str = "answer") -> dict[str, float]:
    """1 if the text inside the last ``<tag>...</tag>`` is the answer, up to surrounding space, else 0.

    >>> tagged_answer("<think>2+2=4</think><answer>4</answer>", "4")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = response.rfind(closing)
    start = response.rfind(opening, 0, end) if end >= 0 else -1
    found = start >= 0
    right = found and response[start + len(opening) : end].strip() == answer.strip()
    return {"score": float(right), "acc": float(right), "format": float(found)}


def gsm8k(response: str, answer: str, *, strict: bool = False) -> dict[str, float]:
    """1 if the response's final number equals the answer's, as numbers: 72, 72.0, 1,234 and $5 are read.

    The final number follows the last ``####`` or ``A:``; without one it is the last number of the text, unless
    ``strict``. The answer may be a number or a whole GSM8K solution.

    >>> gsm8k("So she has 1,234 left. #### 1,234.0", "work ... #### 1234")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    marked = _marked(response)
    number = _last_number(response) if marked is None and not strict else _first_number(marked or "")
    gold = _first_number(_marked(answer) or answer)
    right = number is not None and number == gold
    return {"score": float(right), "acc": float(right), "format": float(marked is not None)}


def _marked(text: str) -> str | None:
    at = max(text.rfind(mark) + len(mark) if mark in text else -1 for mark in ("####", "A:"))
    return text[at:] if at >= 0 else None


def _first_number(text: str) -> Decimal | None:
    match = _NUMBER.search(text)
    return _decimal(match.group()) if match else None


def _last_number(text: str) -> Decimal | None:
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _decimal(last[0].group()) if last else None


def _decimal(text: str) -> Decimal | None:
    if len(text) > _LONGEST_NUMBER:
        return None
    try:
        return Decimal(text.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None
