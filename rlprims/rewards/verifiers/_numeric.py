"""Comparison of a response's final number with the answer."""

from fractions import Fraction

from rlprims.rewards.verifiers._numbers import gold_value, last_value, marked, only_value
from rlprims.rewards.verifiers._tags import boxed, tagged


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
    gold, final = gold_value(str(answer)), marked(response)
    if gold is None:
        raise ValueError(f"answer={answer!r}, expected a text with a number, and only one")
    number = last_value(response) if final is None and not strict else only_value(final or "")
    score = float(number == gold)
    return {"score": score, "acc": score, "format": float(final is not None)}


def numeric(
    response: str, answer: str | float, *, relative: float = 0.0, absolute: float = 0.0, tag: str | None = None
) -> dict[str, float]:
    r"""1 if the response's final number x is close to the answer y: \|x − y\| <= max(absolute, relative \|y\|).

    The final number is the only number in ``<tag>...</tag>`` if ``tag`` is given, else in the last ``\boxed{}``, else
    the last number in the text. It may be written as 3/4, 1.5e-3 or ``4.5 \times 10^{33}``. The bounds are 0 by
    default: the numbers must be equal. The answer may be a number or a whole GSM8K solution.

    Raises:
        ValueError: the answer has no number, or several; or a bound is negative.

    >>> numeric("about 3.1416", "3.14159", relative=1e-3)["score"]
    1.0
    """
    if relative < 0 or absolute < 0:
        raise ValueError(f"relative={relative} and absolute={absolute}, expected bounds of at least 0")
    gold = gold_value(str(answer))
    if gold is None:
        raise ValueError(f"answer={answer!r}, expected a number")
    text = tagged(response, tag) if tag is not None else boxed(response)
    number = only_value(text or "") if text is not None or tag is not None else last_value(response)
    bound = max(Fraction(absolute), Fraction(relative) * abs(gold))
    is_close = number is not None and abs(number - gold) <= bound
    return {"score": float(is_close), "acc": float(is_close), "format": float(number is not None)}
