"""GSM8K: the final number of a response against the number after ``####``."""

from decimal import Decimal
from functools import lru_cache

from rlprims.rewards.verifiers._numbers import first_number, last_number


def gsm8k(response: str, answer: str | float, *, strict: bool = False) -> dict[str, float]:
    """1 if the response's final number equals the answer's, as numbers: 72, 72.0, 1,234 and $5 are read.

    The final number follows the last ``####`` or ``A:``; without one it is the last number of the text, unless
    ``strict``. The answer may be a number or a whole GSM8K solution. (verl compares strings: 72.0 is not 72 there, and
    its strict form reads no ``#### $18``.)

    Raises:
        ValueError: the answer holds no number.

    >>> gsm8k("So she has 1,234 left. #### 1,234.0", "work ... #### 1234")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    gold, marked = _gold(str(answer)), _marked(response)
    number = last_number(response) if marked is None and not strict else first_number(marked or "")
    correct = float(number == gold)
    return {"score": correct, "acc": correct, "format": float(marked is not None)}


@lru_cache(maxsize=1024)  # a group has one
def _gold(answer: str) -> Decimal:
    number = first_number(_marked(answer) or answer)
    if number is None:
        raise ValueError(f"answer={answer!r} holds no number")
    return number


def _marked(text: str) -> str | None:
    """What follows the last mark."""
    hashes = text.rfind("####")
    letter = text.rfind("A:", max(hashes, 0))
    return text[letter + 2 :] if letter >= 0 else text[hashes + 4 :] if hashes >= 0 else None
