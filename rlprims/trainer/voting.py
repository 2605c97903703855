"""Majority voting: the answer that most of k sampled responses give."""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

from rlprims.rewards.verifiers._numbers import last_number
from rlprims.rewards.verifiers._tags import boxed, tagged

Vote: TypeAlias = Literal["boxed", "number", "tag", "text"]


def answer_of(response: str, vote: Vote) -> Hashable | None:
    r"""The answer of a response: its last ``\boxed{}``, its last number, its last ``<answer>``, or the whole text.

    None if it has no such part.

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


def majority_at(answers: Sequence[Hashable | None], scores: Sequence[float], k: int) -> float:
    """maj@k: the score of the answer that most of k responses give, as a mean over all C(n, k) choices of them.

    In a tie the mean of the tied answers counts. Responses without an answer do not vote; if none of the k has one, the
    score is 0. ``scores`` are those of the responses; an answer has the mean score of its responses. verl draws 1000
    samples with replacement; here every choice is counted.

    >>> majority_at(["4", "4", "5"], [1.0, 1.0, 0.0], 3), majority_at(["4", "4", "5"], [1.0, 1.0, 0.0], 2)
    (1.0, 0.6666666666666666)
    """
    n = len(answers)
    if not 1 <= k <= n or len(scores) != n:
        raise ValueError(
            f"k={k} with {n} answers and {len(scores)} scores, expected 1 <= k <= {n} and a score for each"
        )
    counts = Counter(answer for answer in answers if answer is not None)
    mean_scores = {
        answer: math.fsum(score for other, score in zip(answers, scores, strict=True) if other == answer) / count
        for answer, count in counts.items()
    }
    without_answer = n - counts.total()
    return math.fsum(
        score
        * _win_probability(
            counts[answer], [count for other, count in counts.items() if other != answer], without_answer, k
        )
        for answer, score in mean_scores.items()
        if score
    )


def _win_probability(own: int, others: Sequence[int], without_answer: int, k: int) -> float:
    """The probability that an answer with ``own`` votes wins among k drawn responses; a tie counts as a share.

    ``others`` are the votes of the other answers, ``without_answer`` the number of responses without one.
    """
    won = 0.0
    for votes in range(1, min(own, k) + 1):
        ways = {(votes, 1): math.comb(own, votes)}  # by (responses drawn, answers with this number of votes)
        for count in others:
            more: defaultdict[tuple[int, int], int] = defaultdict(int)
            for (drawn, tied), number in ways.items():
                for of_this in range(min(count, votes, k - drawn) + 1):
                    more[drawn + of_this, tied + (of_this == votes)] += number * math.comb(count, of_this)
            ways = more
        won += sum(number * math.comb(without_answer, k - drawn) / tied for (drawn, tied), number in ways.items())
    return won / math.comb(own + sum(others) + without_answer, k)
