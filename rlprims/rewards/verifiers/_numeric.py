"""Comparison of a response's final number with the answer, within a tolerance."""

from fractions import Fraction

from rlprims.rewards.verifiers._numbers import gold_value, last_value, only_value
from rlprims.rewards.verifiers._tags import boxed, tagged


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
