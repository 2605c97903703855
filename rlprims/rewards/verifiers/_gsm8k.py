"""GSM8K: compares the final number of a response with the number after ``####``."""

from rlprims.rewards.verifiers._numbers import gold_value, last_value, marked, only_value


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
