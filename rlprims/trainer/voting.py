"""What k sampled responses answer together: the answer that most of them give."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

from rlprims.rewards.verifiers._numbers import last_number
from rlprims.rewards.verifiers._tags import boxed, tagged

Vote: TypeAlias = Literal["boxed", "number", "tag", "text"]


def answer_of(response: str, vote: Vote) -> Hashable | None:
    r"""What a response votes for: its last ``\boxed{}``, its last number, its last ``<answer>``, or the whole text.

    None, no vote, if it has no such thing.

    >>> answer_of("so 2 + 2 = 4.0", "number") == answer_of("4", "number"), answer_of("no idea", "number")
    (True, None)
    """
    if vote == "number":
        return last_number(response)
    text: str | None = response
    if vote == "boxed":
        text = boxed(response)
    elif vote == "tag":
        text = tagged(response, "answer")
    return None if text is None else "".join(text.split())


def majority_at(answers: Sequence[Hashable | None], right: Sequence[float], k: int) -> float:
    """maj@k: the score of the answer that most of k responses give, mean over the C(n, k) choices of them.

    A tie is drawn by lot, so that each of its answers counts its share; responses without an answer do not vote, and k
    of them score 0. ``right`` is the score of each response; an answer's is the mean of those that give it. With k = n
    it is one vote among all. verl draws 1000 samples with replacement; here every choice is counted.

    >>> majority_at(["4", "4", "5"], [1.0, 1.0, 0.0], 3), majority_at(["4", "4", "5"], [1.0, 1.0, 0.0], 2)
    (1.0, 0.6666666666666666)
    """
    n = len(answers)
    if not 1 <= k <= n or len(right) != n:
        raise ValueError(f"k={k} with {n} answers and {len(right)} scores, expected 1 <= k <= {n} and a score for each")
    counts = Counter(answer for answer in answers if answer is not None)
    scores = {
        answer: math.fsum(score for other, score in zip(answers, right, strict=True) if other == answer) / count
        for answer, count in counts.items()
    }
    silent = n - counts.total()
    return math.fsum(
        score * _chance(counts[answer], [count for other, count in counts.items() if other != answer], silent, k)
        for answer, score in scores.items()
        if score
    )


def _chance(own: int, others: Sequence[int], silent: int, k: int) -> float:
    """That an answer wins among k drawn of its own, the others' and the silent responses; its share of a tie."""
    won = 0.0
    for votes in range(1, min(own, k) + 1):
        ways = {(votes, 1): math.comb(own, votes)}  # by responses drawn, and answers that have so many votes
        for count in others:
            more: defaultdict[tuple[int, int], int] = defaultdict(int)
            for (drawn, tied), number in ways.items():
                for of_this in range(min(count, votes, k - drawn) + 1):
                    more[drawn + of_this, tied + (of_this == votes)] += number * math.comb(count, of_this)
            ways = more
        won += sum(number * math.comb(silent, k - drawn) / tied for (drawn, tied), number in ways.items())
    return won / math.comb(own + sum(others) + silent, k)
