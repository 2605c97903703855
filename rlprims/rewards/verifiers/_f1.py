"""The F1 of the words of a response and of the answer (SQuAD)."""

from collections import Counter
from collections.abc import Sequence

from rlprims.rewards.verifiers._exact import normalize, read


def f1(response: str, answer: str | float | Sequence[str], *, tag: str | None = "answer") -> dict[str, float]:
    """The best F1 of normalized words over the answers (SQuAD); ``em`` is the normalized exact match, and ``acc`` too.

    Words count as often as they occur. ``tag``: only the text in the last ``<tag>...</tag>`` is used; without such a
    tag the score is 0. For Search-R1's reward, which is the exact match, use :func:`exact`.

    >>> f1("<answer>the tower of Eiffel</answer>", ["Eiffel Tower", "Tour Eiffel"])
    {'score': 0.8, 'em': 0.0, 'acc': 0.0, 'format': 1.0}
    """
    found, golds = read(response, answer, tag)
    words = normalize(found or "").split()
    best = max((_f1(words, normalize(gold).split()) for gold in golds), default=0.0) if found is not None else 0.0
    em = float(found is not None and normalize(found) in {normalize(gold) for gold in golds})
    return {"score": best, "em": em, "acc": em, "format": float(found is not None)}


def _f1(found: list[str], gold: list[str]) -> float:
    if not found or not gold:
        return float(found == gold)
    common = sum((Counter(found) & Counter(gold)).values())
    return 2 * common / (len(found) + len(gold))
