"""Majority voting: the answer that most of k sampled responses give."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from rlprims.grouping import check_group_ids, rows_by_label
from rlprims.types import GroupIds, Mean, PerSequence


def majority_at_k(
    answers: Annotated[Tensor, "int64 (B,)"], scores: PerSequence, group_ids: GroupIds, *, k: int
) -> Mean:
    """maj@k: the score of the answer that most of k responses give, mean over all C(n, k) choices, then over prompts.

    In a tie the mean of the tied answers counts. Responses without an answer do not vote; if none of the k has one, the
    score is 0. An answer has the mean score of its responses. A group of fewer than k is not counted. verl draws 1000
    samples with replacement; here every choice is counted.

    Args:
        answers: int64 (B,), equal for equal answers: see ``grouping.dense_ids``. −1: the response has no answer.
        scores: float (B,).
        group_ids: int64 (B,), dense. If metrics are merged, each group must be in one part.
        k: the number of responses that vote.

    Returns:
        Mean, in float64, computed on the host.

    Raises:
        ValueError: wrong shapes or dtypes; k below 1.

    >>> answers, scores = torch.tensor([4, 4, 5]), torch.tensor([1.0, 1.0, 0.0])
    >>> one_group = torch.zeros(3, dtype=torch.int64)
    >>> majority_at_k(answers, scores, one_group, k=3).value(), majority_at_k(answers, scores, one_group, k=2).value()
    (tensor(1., dtype=torch.float64), tensor(0.6667, dtype=torch.float64))
    """
    if k < 1:
        raise ValueError(f"k={k}, expected at least 1: the number of responses that vote")
    if not answers.shape == scores.shape == group_ids.shape:
        raise ValueError(
            f"answers has shape {tuple(answers.shape)}, scores has {tuple(scores.shape)}, group_ids has "
            f"{tuple(group_ids.shape)}: expected (B,) for all three"
        )
    if answers.dtype is not torch.int64:
        raise ValueError(f"answers has dtype {answers.dtype}, expected torch.int64: use grouping.dense_ids(answers)")
    check_group_ids(group_ids)
    labels, numbers = answers.tolist(), scores.tolist()
    groups = [rows for rows in rows_by_label(group_ids.tolist()) if len(rows) >= k]
    of_groups = [_majority_score([labels[i] for i in rows], [numbers[i] for i in rows], k) for rows in groups]
    total = torch.tensor(math.fsum(of_groups), dtype=torch.float64, device=scores.device)
    return Mean(total, torch.tensor(len(groups), device=scores.device))


def _majority_score(answers: Sequence[int], scores: Sequence[float], k: int) -> float:
    """maj@k of the responses to one prompt."""
    counts = Counter(answer for answer in answers if answer >= 0)
    mean_scores = {
        answer: math.fsum(score for other, score in zip(answers, scores, strict=True) if other == answer) / count
        for answer, count in counts.items()
    }
    without_answer = len(answers) - counts.total()
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
