"""A response against the answer as text."""

import re
import string
from collections.abc import Iterable, Sequence

from rlprims.rewards.verifiers._tags import tagged

_DROPPED = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def exact(
    response: str, answer: str | float | Sequence[str], *, tag: str | None = None, normalized: bool = False
) -> dict[str, float]:
    """1 if the response is the answer, or one of several, up to surrounding space.

    ``tag``: compare what the last ``<tag>...</tag>`` holds instead of the whole response. ``normalized``: without case,
    punctuation, articles and repeated space, as SQuAD compares.

    >>> exact("The Eiffel Tower!", "eiffel tower", normalized=True)["score"]
    1.0
    """
    found, golds = read(response, answer, tag)
    clean = normalize if normalized else str.strip
    is_correct = found is not None and clean(found) in {clean(gold) for gold in golds}
    return {"score": float(is_correct), "acc": float(is_correct), "format": float(found is not None)}


def normalize(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_DROPPED)).split())


def read(response: str, answer: str | float | Sequence[str], tag: str | None) -> tuple[str | None, list[str]]:
    """The answer in the response, None if there is none, and the expected answers."""
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    golds = [answer] if isinstance(answer, str) else list(answer) if isinstance(answer, Iterable) else []
    if not golds or not all(isinstance(gold, str) for gold in golds):
        raise ValueError(f"answer={answer!r} must be a text or a list of texts, at least one")
    return (tagged(response, tag) if tag is not None else response), golds
