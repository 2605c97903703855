"""GSM8K: compares the final number of a response with the number after ``####``."""

from fractions import Fraction
from functools import lru_cache

from rlprims.rewards.verifiers._numbers import last_value, only_value


def gsm8k(response: str, answer: str | float, *, strict: bool = False) -> dict[str, float]:
    """1 if the response's final number equals the answer's: 72, 72.0, 1,234, $5, 3/4 and 2 million are read.

    The final number is the one after the last ``####`` or ``A:``, and must be the only one in that line or sentence.
    Without such a mark it is the last number of the text, unless ``strict``. The answer may be a number or a whole
    GSM8K solution. (verl compares strings: there 72.0 is not 72, and its strict form cannot read ``#### $18``.)

    Raises:
        ValueError: the answer contains no number, or several.

    >>> gsm8k("So she has 1,234 left. #### 1,234.0", "work ... #### 1234")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    gold, marked = _gold(str(answer)), _marked(response)
    number = last_value(response) if marked is None and not strict else only_value(marked or "")
    score = float(number == gold)
    return {"score": score, "acc": score, "format": float(marked is not None)}


@lru_cache(maxsize=1024)  # all responses of a group have the same answer
def _gold(answer: str) -> Fraction:
    number = only_value(_marked(answer) or answer)
    if number is None:
        raise ValueError(f"answer={answer!r}, expected a text with a number, and only one")
    return number


def _marked(text: str) -> str | None:
    """The text after the last mark, ``####`` or ``A:``; None without a mark."""
    hashes = text.rfind("####")
    letter = text.rfind("A:", max(hashes, 0))
    return text[letter + 2 :] if letter >= 0 else text[hashes + 4 :] if hashes >= 0 else None
