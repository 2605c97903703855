"""The text inside an answer tag against the answer."""

from rlprims.rewards.verifiers._tags import tagged


def tagged_answer(response: str, answer: str | float, *, tag: str = "answer") -> dict[str, float]:
    """1 if the text inside the last ``<tag>...</tag>`` is the answer, up to surrounding space, else 0.

    >>> tagged_answer("<think>2+2=4</think><answer>4</answer>", "4")
    {'score': 1.0, 'acc': 1.0, 'format': 1.0}
    """
    found = tagged(response, tag)
    is_correct = found is not None and found.strip() == str(answer).strip()
    return {"score": float(is_correct), "acc": float(is_correct), "format": float(found is not None)}
