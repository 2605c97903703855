"""See :func:`gsm8k`."""

from rlprims.rewards.verifiers._numbers import first_number, last_number


def gsm8k(response: str, answer: str, *, strict: bool = False) -> dict[str, float]:
    """1 if the response's final number equals the answer's, as numbers: 72, 72.0, 1,234 and $5 are read.

    The final number follows the last ``####`` or ``A:``; without one it is the last number of the text, unless
    ``strict``. The answer may be a number or a whole GSM8K solution. (verl compares strings: 72.0 is not 72 there, and
    its strict form reads no ``#### $18``.)

    Raises:
        ValueError: the answer holds no number.

    >>> gsm8k("So she has 1,234 left. #### 1,234.0", "work ... #### 1234")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    marked = _marked(response)
    number = last_number(response) if marked is None and not strict else first_number(marked or "")
    right = number is not None and number == first_number(_marked(answer) or answer)
    return {"score": float(right), "acc": float(right), "format": float(marked is not None)}


def _marked(text: str) -> str | None:
    ends = [at + len(mark) for mark in ("####", "A:") if (at := text.rfind(mark)) >= 0]
    return text[max(ends) :] if ends else None
