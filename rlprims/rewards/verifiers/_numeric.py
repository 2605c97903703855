"""The final number of a response against the answer, within a tolerance."""

from decimal import Decimal

from rlprims.rewards.verifiers._numbers import last_number
from rlprims.rewards.verifiers._tags import boxed, tagged


def numeric(
    response: str, answer: str | float, *, relative: float = 0.0, absolute: float = 0.0, tag: str | None = None
) -> dict[str, float]:
    r"""1 if the response's final number x is near the answer's y: \|x − y\| <= max(absolute, relative \|y\|).

    The final number is the last one in ``<tag>...</tag>`` if a tag is named, else in the last ``\boxed{}``, else in the
    text. The bounds are 0 by default: equal as numbers.

    Raises:
        ValueError: the answer is no number, or a bound is negative.

    >>> numeric("about 3.1416", "3.14159", relative=1e-3)["score"]
    1.0
    """
    if relative < 0 or absolute < 0:
        raise ValueError(f"relative={relative} and absolute={absolute} must not be negative: they bound a distance")
    gold = last_number(str(answer), scientific=True)
    if gold is None:
        raise ValueError(f"answer={answer!r} is no number")
    place = tagged(response, tag) if tag is not None else boxed(response)
    number = last_number(place if place is not None else "" if tag else response, scientific=True)
    bound = max(Decimal(absolute), Decimal(relative) * abs(gold))
    is_correct = number is not None and abs(number - gold) <= bound
    return {"score": float(is_correct), "acc": float(is_correct), "format": float(number is not None)}
