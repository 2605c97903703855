"""Terms of a response's score that depend on its length, or on the reason why it ended.

The length of a response is the number of its valid tokens: those that the policy sampled.
"""

import math

import torch

from rlprims._described import described
from rlprims.ended import EndedName
from rlprims.grouping import group_bounds, group_count, group_sum
from rlprims.layout import last_of_turn, sequence_lengths
from rlprims.masking import (
    check_at_least,
    check_finite,
    check_range,
    check_sequences,
    check_tokens,
    ended_by,
    upcast,
    zero_outside,
)
from rlprims.types import CuSeqlens, EndedCodes, GroupIds, PerSequence, TokenMask, TurnIds


@described
def overlong_penalty(
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    max_length: int,
    buffer_length: int,
    penalty_factor: float = 1.0,
) -> PerSequence:
    """Soft overlong punishment, DAPO (Yu et al. 2025, arXiv:2503.14476), eq. 13, to be added to the score.

    With l the tokens that the policy sampled, L = max_length, C = buffer_length, f = penalty_factor:
    0 for l <= L − C; f (L − C − l) / C up to L; −f for l > L (in verl, NeMo-RL and AReaL it falls further). Tool tokens
    do not count, because the policy did not sample them. With C = 0 the penalty is a step from 0 to −f after L.

    If you add this to the score, filter groups by the accuracy: in a group of wrong responses only the penalty differs,
    and the policy would learn to be short.

    Args:
        buffer_length: C, in tokens; from 0 to L.

    Returns:
        float32 (B,), between −f and 0.

    >>> m = torch.arange(12) < torch.tensor([6, 7, 10, 12])[:, None]
    >>> overlong_penalty(m, max_length=10, buffer_length=4)
    tensor([-0.0000, -0.2500, -1.0000, -1.0000])
    """
    check_tokens(response_mask, cu_seqlens)
    if not 0 <= buffer_length <= max_length or max_length == 0:
        raise ValueError(f"buffer_length={buffer_length}, expected 0 to max_length={max_length}, which must be above 0")
    check_at_least(0, ": it is the size of the penalty", penalty_factor=penalty_factor)
    excess = (sequence_lengths(response_mask, cu_seqlens) - (max_length - buffer_length)).float()
    share = excess / buffer_length if buffer_length > 0 else (excess > 0).float()
    return -penalty_factor * share.clamp(0.0, 1.0)


@described
def cosine_length(
    scores: PerSequence,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    max_length: int,
    correct_short: float = 1.0,
    correct_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    correct_above: float = 0.5,
) -> PerSequence:
    """Cosine reward (arXiv:2502.03373), appendix C.1, as a term: the difference between this reward and the score.

    The new score is long + (short − long) (1 + cos(π min(l / L, 1))) / 2, with the two values of a correct or of a
    wrong answer, l the tokens that the policy sampled and L = max_length: it rewards short correct answers and long
    wrong ones. For l > L it is ``long``; for the paper's value of a response that was cut off use
    :func:`~rlprims.rewards.truncation_penalty`. The defaults are TRL's ``max_value_correct``, ``min_value_correct``,
    ``min_value_wrong`` and ``max_value_wrong``, in this order.

    Args:
        correct_short, correct_long: new score of a correct answer of 0 and of L tokens.
        wrong_short, wrong_long: new score of a wrong answer of 0 and of L tokens.

    Returns:
        the new score minus the old one. A response without a token gets 0.

    >>> m = torch.arange(8) < torch.tensor([[4], [4], [8]])
    >>> scores = torch.tensor([1.0, 0.0, 1.0])
    >>> scores + cosine_length(scores, m, max_length=8)
    tensor([ 0.7500, -0.7500,  0.5000])
    """
    check_sequences(response_mask, cu_seqlens, scores=scores)
    check_at_least(1, ": the tokens at which the long value is reached", max_length=max_length)
    check_finite(correct_short=correct_short, correct_long=correct_long, correct_above=correct_above)
    check_finite(wrong_short=wrong_short, wrong_long=wrong_long)
    lengths = sequence_lengths(response_mask, cu_seqlens)
    has_tokens = lengths > 0
    s = zero_outside(scores, has_tokens)
    shortness = (1 + torch.cos(math.pi * (lengths.to(s.dtype) / max_length).clamp(max=1.0))) / 2
    if_correct = correct_long + (correct_short - correct_long) * shortness
    if_wrong = wrong_long + (wrong_short - wrong_long) * shortness
    return zero_outside(torch.where(s > correct_above, if_correct, if_wrong) - s, has_tokens)


@described
def relative_length(
    scores: PerSequence,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    weight: float = 1.0,
    correct_above: float = 0.5,
) -> PerSequence:
    """Length reward of Kimi k1.5 (arXiv:2501.12599), section 2.3.3, to be added to the score.

    With l the tokens that the policy sampled, λ = 0.5 − (l − min) / (max − min) over the group: 0.5 for the shortest
    response and −0.5 for the longest. A correct answer gets w λ and a wrong one w min(0, λ), so that a short wrong
    answer gets no reward. If all lengths of a group are equal, every λ is 0. The paper adds it only later in the
    training, because early it keeps answers from becoming longer.

    Args:
        weight: w, in units of the score; at least 0.

    Returns:
        between −w/2 and w/2. A response without a token gets 0 and does not count as the shortest.

    >>> m = torch.arange(8) < torch.tensor([[2], [4], [6], [2]])
    >>> relative_length(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.int64), m)
    tensor([ 0.5000,  0.0000, -0.5000,  0.0000])
    """
    check_sequences(response_mask, cu_seqlens, scores=scores, group_ids=group_ids)
    check_at_least(0, ": a negative weight would reward length", weight=weight)
    check_finite(correct_above=correct_above)
    lengths = sequence_lengths(response_mask, cu_seqlens).to(upcast(scores).dtype)
    has_tokens = lengths > 0
    shortest, longest = group_bounds(lengths, group_ids, has_tokens)
    lambdas = 0.5 - (lengths - shortest) / (longest - shortest).clamp(min=1)
    lambdas = torch.where(scores > correct_above, lambdas, lambdas.clamp(max=0.0))
    return zero_outside(weight * lambdas, has_tokens & (longest > shortest))


@described
def solve_rate_length(
    scores: PerSequence,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    max_length: int,
    coefficient: float = 0.25,
    correct_above: float = 0.5,
) -> PerSequence:
    """Adaptive length penalty (arXiv:2506.05256), to be added to the score: larger for easy prompts.

    −c max(p, 1/G) l / L with p the share of the group's G responses that are correct, l the tokens that the policy
    sampled and L = max_length. The penalty is the same for correct and wrong responses.

    Where sources disagree: SkyRL (whose c is the default here) and prime-rl leave 1/G out, so that the penalty is 0 for
    a prompt that no response solves; prime-rl divides the length by that of the longest response of the group.

    Args:
        coefficient: c, the penalty of a response of L tokens if all responses are correct; at least 0.

    Returns:
        at most 0. A response without a token counts in its group as wrong.

    >>> m = torch.arange(8) < torch.tensor([[4], [8], [8]])
    >>> solve_rate_length(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 1]), m, max_length=8)
    tensor([-0.0625, -0.1250, -0.2500])
    """
    check_sequences(response_mask, cu_seqlens, scores=scores, group_ids=group_ids)
    check_at_least(1, max_length=max_length)
    check_at_least(0, coefficient=coefficient)
    check_finite(correct_above=correct_above)
    lengths = sequence_lengths(response_mask, cu_seqlens)
    correct = group_count(group_ids, (scores > correct_above) & (lengths > 0))
    rate = correct.clamp(min=1).to(upcast(scores).dtype) / group_count(group_ids)
    return -coefficient * rate * lengths / max_length


@described
def cost_per_token(
    scores: PerSequence,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    context_lengths: PerSequence | None = None,
    turn_ids: TurnIds | None = None,
    *,
    output: float = 0.25,
    context: float = 0.1,
    turns: float = 0.1,
) -> PerSequence:
    """Linear cost of output, context and turns, as prime-rl's (pull request 2901), to be added to the score.

    −s̄ (a out / max out + b in / max in + c turns / max turns): ``out`` counts the tokens that the policy sampled,
    ``in`` the other tokens of its context, and ``turns`` its calls; each is divided by the largest of the group. s̄ is
    the mean score of the group, the share of correct responses: the cost is 0 if no response is correct, and a + b + c
    for the longest response if all are correct. Correct and wrong responses of a group have the same factors.

    If the mean is below 0 (scores that are not 0 or 1) the cost is 0: otherwise length would be rewarded.

    Args:
        context_lengths: int or float (B,), tokens that the policy read and did not sample: the prompt, tool output.
            None: no cost of the context.
        turn_ids: the turn of the response that a valid token belongs to. None: no cost of turns.
        output, context, turns: a, b and c, in units of the score; at least 0.

    Returns:
        at most 0. A response without a token counts in its group as wrong, and its own cost is 0.

    >>> m = torch.arange(8) < torch.tensor([[4], [8]])
    >>> scores, group, read = torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([30, 10])
    >>> cost_per_token(scores, group, m, context_lengths=read)  # s̄ is ½: −½ (¼ · ½ + 0.1), −½ (¼ + 0.1 / 3)
    tensor([-0.1125, -0.1417])
    """
    check_sequences(response_mask, cu_seqlens, scores=scores, group_ids=group_ids)
    check_at_least(0, output=output, context=context, turns=turns)
    dtype = upcast(scores).dtype
    lengths = sequence_lengths(response_mask, cu_seqlens).to(dtype)
    has_tokens = lengths > 0

    def share(x: PerSequence) -> PerSequence:
        _, largest = group_bounds(x, group_ids, has_tokens)
        return x / largest.clamp(min=1)

    cost = output * share(lengths)
    if context_lengths is not None:
        check_sequences(response_mask, cu_seqlens, context_lengths=context_lengths)
        cost = cost + context * share(context_lengths.to(dtype))
    if turn_ids is not None:
        ends = last_of_turn(turn_ids, response_mask, cu_seqlens)
        cost = cost + turns * share(sequence_lengths(ends, cu_seqlens).to(dtype))
    rate = group_sum(zero_outside(scores, has_tokens), group_ids) / group_count(group_ids)
    return zero_outside(-rate.clamp(min=0.0) * cost, has_tokens)


@described
def truncation_penalty(
    scores: PerSequence,
    ended: EndedCodes,
    *,
    scale: float = 1.0,
    penalty: float = 0.0,
    reasons: tuple[EndedName, ...] = ("length",),
) -> PerSequence:
    """Penalty of a truncated response, to be added to the score.

    The score s of a truncated response becomes c s − p. With c = 1 it is the constant of TRL and NeMo-RL for a missing
    end of sequence; with p = 0 the stop-properly coefficient of OpenRLHF and NeMo-RL, 0 <= c <= 1; and with c = 0 every
    truncated response scores −p, which OpenRLHF writes as a negative coefficient.

    A factor below 1 does not change a score of 0 and raises a negative score: use a penalty for such scores.

    Args:
        scale: c, in [0, 1].
        penalty: p, in units of the score; at least 0, and above 0 if c is 1.
        reasons: those for which a response is penalized, labels of :class:`rlprims.ended.Ended`.

    Returns:
        (c − 1) s − p if a response ended for one of the reasons, else 0.

    >>> from rlprims.ended import Ended
    >>> scores, ended = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([Ended.STOP, Ended.LENGTH, Ended.LENGTH])
    >>> truncation_penalty(scores, ended, penalty=0.5)
    tensor([ 0.0000, -0.5000, -0.5000])
    >>> scores + truncation_penalty(scores, ended, scale=0.0, penalty=1.0)
    tensor([ 1., -1., -1.])
    """
    is_truncated = ended_by(ended, reasons)
    if scores.shape != ended.shape:
        raise ValueError(f"scores has shape {tuple(scores.shape)}, ended has {tuple(ended.shape)}: expected (B,)")
    check_range(0, 1, scale=scale)
    check_at_least(0, penalty=penalty)
    if scale == 1 and penalty == 0:
        raise ValueError("scale=1 and penalty=0 change nothing, expected another value of one of them")
    return zero_outside((scale - 1) * upcast(scores) - penalty, is_truncated)
