"""Metrics of responses and of the groups that answer the same prompt, such as pass@k and majority votes."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.diagnostics._tokens import moments
from rlprims.filters import varied_scores
from rlprims.grouping import check_rows, group_ranks, rows_by_label
from rlprims.layout import sequence_lengths, sequence_sum
from rlprims.masking import check_sequences, check_tokens, upcast
from rlprims.types import Correlation, CuSeqlens, GroupIds, Mean, Metrics, PerSequence, PerToken, RowMask, TokenMask


@described
def response_stats(scores: PerSequence, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> Metrics:
    """``score``: mean raw score; ``length``: mean response length in tokens; ``length_score_correlation``.

    >>> m = torch.tensor([[True, True], [True, False]])
    >>> {name: float(metric.value()) for name, metric in response_stats(torch.tensor([1.0, 0.0]), m).items()}
    {'score': 0.5, 'length': 1.5, 'length_score_correlation': 1.0}
    """
    check_sequences(response_mask, cu_seqlens, scores=scores)
    lengths = sequence_lengths(response_mask, cu_seqlens)
    rows = torch.ones_like(lengths).sum()
    return {
        "score": Mean(upcast(scores.detach()).sum(), rows),
        "length": Mean(lengths.sum(), rows),
        "length_score_correlation": length_correlation(scores, response_mask, cu_seqlens),
    }


@described
def length_correlation(x: PerSequence, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> Correlation:
    """Pearson's correlation of the responses' lengths with their scores or advantages: above 0 if longer is better.

    >>> m = torch.tensor([[True, True], [True, False]])
    >>> length_correlation(torch.tensor([0.0, 1.0]), m).value()
    tensor(-1.)
    """
    check_sequences(response_mask, cu_seqlens, x=x)
    lengths = sequence_lengths(response_mask, cu_seqlens).to(upcast(x).dtype)
    return moments(Correlation, torch.ones_like(x, dtype=torch.bool), lengths, x)


@described
def log_perplexity(log_probs: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> Mean:
    """Mean over responses of −mean over tokens of log π, in nats; ``exp`` of it is the geometric mean perplexity.

    A response without a token is not counted.

    >>> log_perplexity(torch.tensor([[-1.0, -3.0], [-4.0, 9.0]]), torch.tensor([[True, True], [True, False]])).value()
    tensor(3.)
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs)
    lengths = sequence_lengths(response_mask, cu_seqlens)
    sums = sequence_sum(log_probs.detach(), response_mask, cu_seqlens)
    return Mean((-sums / lengths.clamp(min=1)).sum(), (lengths > 0).sum())


@described
def fraction(rows: RowMask) -> Mean:
    """The share of rows that are True.

    >>> fraction(torch.tensor([True, False])).value()
    tensor(0.5000)
    """
    if rows.dim() != 1 or rows.dtype is not torch.bool:
        raise ValueError(f"rows has shape {tuple(rows.shape)} and dtype {rows.dtype}, expected bool (B,)")
    return Mean(rows.sum(), torch.ones_like(rows).sum())


@described
def dead_groups(scores: PerSequence, group_ids: GroupIds, *, tolerance: float = 1e-6) -> Mean:
    """The share of groups without a signal: those that ``filters.varied_scores`` would drop.

    The parts of a batch merge to the whole if each group is in one part.

    >>> dead_groups(torch.tensor([0.1, 0.1, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])).value()
    tensor(0.5000)
    """
    is_dead = ~varied_scores(scores, group_ids, tolerance=tolerance)
    dead = torch.zeros_like(is_dead).scatter(0, group_ids, is_dead)
    present = torch.zeros_like(is_dead).scatter(0, group_ids, torch.ones_like(is_dead))
    return Mean(dead.sum(), present.sum())


@described
def best_at_k(scores: PerSequence, group_ids: GroupIds, *, k: int) -> Mean:
    """The expected score of the best of k samples, as a mean over prompts: unbiased, from n >= k samples of each.

    The mean over all C(n, k) subsets of a group: with its scores ascending, Σ_i x_i C(i − 1, k − 1) / C(n, k). The
    worst of k is ``-best_at_k(-scores)``. verl draws k with replacement, a thousand times, from the global generator:
    one success in 32 is a best@32 of 0.62 there, and 1 here. A group of fewer than k is not counted.

    Args:
        group_ids: if metrics are merged, each group must be in one part.
        k: at least 1.

    Returns:
        Mean, in float64.

    >>> best_at_k(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 0, 0]), k=2).value()  # (3 + 3 + 2) / 3
    tensor(2.6667, dtype=torch.float64)
    """
    if k < 1:
        raise ValueError(f"k={k}, expected at least 1: the number of samples of which the best is taken")
    check_rows(group_ids, scores=scores)
    ranks = group_ranks(scores, group_ids)
    n, rank = ranks.sizes, ranks.ranks
    # C(i − 1, k − 1) / C(n, k) with i = rank + 1, as a product of k factors, so that no factorial is computed.
    j = torch.arange(1, k, device=scores.device)
    factors = (rank[:, None] + 1 - j).clamp(min=0).double() / (n[:, None] - j).clamp(min=1)
    probability_of_best = factors.prod(-1) * k / n
    terms = torch.where(n >= k, ranks.sort(scores.detach()).double() * probability_of_best, 0.0)
    return Mean(terms.sum(), ((n >= k) & (rank == 0)).sum())


@described
def pass_at_k(correct: RowMask, group_ids: GroupIds, *, k: int) -> Mean:
    """The probability that one of k samples is correct, mean over prompts: Chen et al. 2021 (arXiv:2107.03374), eq. 1.

    With c of n correct it is 1 − C(n − c, k) / C(n, k), unbiased; 1 − (1 − c/n)^k is too low. See :func:`best_at_k`.

    >>> pass_at_k(torch.tensor([True, False, False, False]), torch.tensor([0, 0, 0, 0]), k=2).value()
    tensor(0.5000, dtype=torch.float64)
    """
    if correct.dtype is not torch.bool:
        raise ValueError(f"correct has dtype {correct.dtype}, expected torch.bool: compare the score with a threshold")
    check_rows(group_ids, correct=correct)
    return best_at_k(correct.double(), group_ids, k=k)


@described
def majority_at_k(
    answers: Annotated[Tensor, "int64 (B,)"], scores: PerSequence, group_ids: GroupIds, *, k: int
) -> Mean:
    """maj@k: the score of the answer that most of k responses give, mean over all C(n, k) choices, then over prompts.

    In a tie the mean of the tied answers counts. Responses without an answer do not vote; if none of the k has one, the
    score is 0. An answer has the mean score of its responses. A group of fewer than k is not counted. verl draws 1000
    samples with replacement; here every choice is counted.

    Args:
        answers: equal for equal answers: see ``grouping.dense_ids``. −1: the response has no answer.
        group_ids: if metrics are merged, each group must be in one part.
        k: the number of responses that vote; at least 1.

    Returns:
        Mean, in float64, computed on the host.

    >>> answers, scores = torch.tensor([4, 4, 5]), torch.tensor([1.0, 1.0, 0.0])
    >>> one_group = torch.zeros(3, dtype=torch.int64)
    >>> majority_at_k(answers, scores, one_group, k=3).value(), majority_at_k(answers, scores, one_group, k=2).value()
    (tensor(1., dtype=torch.float64), tensor(0.6667, dtype=torch.float64))
    """
    if k < 1:
        raise ValueError(f"k={k}, expected at least 1: the number of responses that vote")
    check_rows(group_ids, answers=answers, scores=scores)
    if answers.dtype is not torch.int64:
        raise ValueError(f"answers has dtype {answers.dtype}, expected torch.int64: use grouping.dense_ids(answers)")
    labels, numbers = answers.tolist(), scores.tolist()
    groups = [rows for rows in rows_by_label(group_ids.tolist()) if len(rows) >= k]
    of_groups = [_majority_score([labels[i] for i in rows], [numbers[i] for i in rows], k) for rows in groups]
    total = torch.tensor(math.fsum(of_groups), dtype=torch.float64, device=scores.device)
    return Mean(total, torch.tensor(len(groups), device=scores.device))


def _majority_score(answers: Sequence[int], scores: Sequence[float], k: int) -> float:
    """maj@k of the responses to one prompt."""
    votes = Counter(answer for answer in answers if answer >= 0)
    without_answer = len(answers) - votes.total()
    terms = []
    for answer, own in votes.items():
        score = math.fsum(score for other, score in zip(answers, scores, strict=True) if other == answer) / own
        if score:
            others = [count for other, count in votes.items() if other != answer]
            terms.append(score * _win_probability(own, others, without_answer, k))
    return math.fsum(terms)


def _win_probability(own: int, others: Sequence[int], without_answer: int, k: int) -> float:
    """The probability that an answer with ``own`` votes wins among k drawn responses; a tie counts as a share."""
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
