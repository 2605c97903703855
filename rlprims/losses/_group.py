"""Losses that compare the responses of a group: GVPO, REAL, FlowRL and online DPO.

Each response's loss depends on the log-probs of its whole group, so a group must not be split over micro-batches or
ranks. An :class:`~rlprims.algorithms.Algorithm` keeps groups whole for every loss that takes ``group_ids``. A row
without tokens is in no group, and a group of one has loss 0.
"""

import torch

from rlprims._described import described
from rlprims.grouping import first_rows, group_bounds, group_centred, group_count, group_sum
from rlprims.layout import expand_to_tokens, sequence_lengths, sequence_sum, to_tokens
from rlprims.losses._preference import dpo
from rlprims.masking import check_above, check_range, check_sequences, check_tokens, upcast, zero_outside
from rlprims.ratios import clamp_log_ratio
from rlprims.scan import discounted_sum
from rlprims.types import AllReduce, CuSeqlens, GroupIds, PerSequence, PerToken, RowMask, TokenMask


@described
def gvpo(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    beta: float = 0.1,
    all_reduce_rows: AllReduce | None = None,
) -> PerToken:
    """Group variance policy optimization, Zhang et al. 2025 (arXiv:2504.19599): fits implicit rewards to advantages.

    With R_i = β Σ_t (log_probs − old_log_probs), the implicit reward, and A_i the mean of the response's advantages:
    loss_i = G/(G − 1) · ½ [(R_i − mean_g R) − (A_i − mean_g A)]², on each token of response i in a group of G. Under
    ``seq_mean_token_mean`` the sum over a group is divided by G − 1, as in the authors' code. The loss is 0 if the
    policy is π_old e^(A/β) / Z. The responses may come from any policy, and no importance ratio is needed. A group must
    be whole; a group of one has loss 0. The authors' code treats the group's mean of R as a constant, which does not
    change the gradient, because the residuals of a group sum to 0.

    Args:
        old_log_probs: the reference of the KL; in the paper the policy at the start of the step.
        beta: β > 0, the coefficient of the KL in the objective whose optimum is fitted.

    >>> m, one_group = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    >>> log_probs, advantages = torch.tensor([[-1.0], [-2.0]]), torch.tensor([[0.5], [-0.5]])
    >>> gvpo(log_probs, torch.full((2, 1), -2.0), advantages, one_group, m, beta=1.0)  # R is 1 and 0, so the loss is 0
    tensor([[0.],
            [0.]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_sequences(response_mask, cu_seqlens, group_ids=group_ids)
    check_above(0, ": the coefficient of the KL", beta=beta)

    lengths = sequence_lengths(response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    has_tokens = lengths > 0
    log_ratios = upcast(log_probs) - upcast(old_log_probs).detach()
    implicit_rewards = beta * sequence_sum(log_ratios, response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    row_advantages = _row_means(advantages.detach(), response_mask, cu_seqlens, all_reduce_rows)
    residuals = group_centred(implicit_rewards - row_advantages, group_ids, has_tokens)
    samples = group_count(group_ids, has_tokens)
    losses = residuals.square() / 2 * samples / (samples - 1).clamp(min=1)
    return to_tokens(losses, response_mask, cu_seqlens)


@described
def rewards_as_labels(
    log_probs: PerToken,
    old_log_probs: PerToken,
    advantages: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    tau: float = 0.5,
    all_reduce_rows: AllReduce | None = None,
) -> PerToken:
    """Rewards as labels, Zhai et al. 2026 (arXiv:2602.05630): classifies the responses of a group as good or bad.

    With s_i the mean of log_probs − old_log_probs over response i, used as a logit, and + and − the responses of a
    group with A > 0 and with A <= 0: loss = log(1 + Σ_{i in +} e^(−s_i/τ)) + log(1 + Σ_{j in −} e^(s_j/τ)). Each token
    of a group has the group's loss, so ``prompt_token_mean`` is the mean over groups. A group with only good or only
    bad responses has loss 0. The weight of a response in the gradient is at most 1/τ and goes to 0 when its logit has
    the correct sign; GRPO's weight grows when a good response becomes more likely. s is clamped to ±20. A group must be
    whole. The formula is that of ms-swift (``loss_type="real"``), which divides by the number of all groups.

    Args:
        advantages: the sign of a response's mean is its label.
        tau: τ > 0, in nats per token.

    >>> m, one_group = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    >>> z, advantages = torch.zeros(2, 1), torch.tensor([[1.0], [-1.0]])
    >>> rewards_as_labels(z, z, advantages, one_group, m)  # 2 log 2
    tensor([[1.3863],
            [1.3863]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_sequences(response_mask, cu_seqlens, group_ids=group_ids)
    check_above(0, ": the temperature of the logits", tau=tau)

    has_tokens = sequence_lengths(response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows) > 0
    log_ratios = upcast(log_probs) - upcast(old_log_probs).detach()
    logits = clamp_log_ratio(_row_means(log_ratios, response_mask, cu_seqlens, all_reduce_rows)) / tau
    is_good = _row_means(advantages.detach(), response_mask, cu_seqlens, all_reduce_rows) > 0
    is_bad = has_tokens & ~is_good
    losses = _log_one_plus_sum_exp(-logits, group_ids, is_good) + _log_one_plus_sum_exp(logits, group_ids, is_bad)
    has_both = (group_count(group_ids, is_good) > 0) & (group_count(group_ids, is_bad) > 0)
    return to_tokens(zero_outside(losses, has_both), response_mask, cu_seqlens)


@described
def flowrl(
    log_probs: PerToken,
    old_log_probs: PerToken,
    ref_log_probs: PerToken,
    advantages: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    beta: float = 15.0,
    w_max: float = 10.0,
    all_reduce_rows: AllReduce | None = None,
) -> PerToken:
    """FlowRL, Zhu et al. 2025 (arXiv:2509.15207): fits the policy to the distribution π_ref e^(βA) / Z.

    With x_i the mean of log_probs − ref_log_probs over response i, minus β A_i, and the constant w_i = min(exp(Σ_t
    (log_probs − old_log_probs)), w_max): loss_i = w_i (log Z + x_i)² on each token, for ``seq_mean_token_mean``.

    log Z is the constant that minimizes the group's loss, −Σ w_i x_i / Σ w_i. In the paper a head on the prompt's
    hidden states learns log Z with the same loss; if it can separate the prompts, the policy's gradient is the same.
    With sums instead of means, and w = 1, it is :func:`gvpo`'s loss. As in the authors' code, A is GRPO's advantage,
    and the log-ratio to the old policy is a sum, clamped to ±20. A group must be whole; a group of one has loss 0.

    Args:
        advantages: the mean over a response is its reward.
        beta: β > 0, the inverse temperature of the target, in nats per token and unit of advantage (authors: 15).
        w_max: largest importance weight, above 0.

    >>> m, one_group = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    >>> x, z, advantages = torch.tensor([[-1.0], [-2.0]]), torch.full((2, 1), -2.0), torch.tensor([[1.0], [-1.0]])
    >>> flowrl(x, x, z, advantages, one_group, m, beta=1.5)  # 1 − 1.5 and 0 + 1.5, and their mean is 0.5
    tensor([[1.],
            [1.]])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, ref_log_probs=ref_log_probs)
    check_sequences(response_mask, cu_seqlens, group_ids=group_ids)
    check_above(0, beta=beta)
    check_above(0, inf=True, w_max=w_max)

    has_tokens = sequence_lengths(response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows) > 0
    old_log_ratios = upcast(log_probs.detach()) - upcast(old_log_probs).detach()
    log_w = sequence_sum(old_log_ratios, response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    w = clamp_log_ratio(log_w).exp().clamp(max=w_max)
    ref_log_ratios = upcast(log_probs) - upcast(ref_log_probs).detach()
    x = _row_means(ref_log_ratios, response_mask, cu_seqlens, all_reduce_rows)
    x = x - beta * _row_means(advantages.detach(), response_mask, cu_seqlens, all_reduce_rows)
    sum_w = group_sum(w, group_ids, has_tokens)
    log_z = -group_sum(w * x.detach(), group_ids, has_tokens) / torch.where(sum_w > 0, sum_w, 1.0)
    return to_tokens(w * (log_z + x).square(), response_mask, cu_seqlens)


@described
def online_dpo(
    log_probs: PerToken,
    ref_log_probs: PerToken,
    advantages: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    beta: float = 0.1,
    all_reduce_rows: AllReduce | None = None,
) -> PerToken:
    """Online DPO, Guo et al. 2024 (arXiv:2402.04792): :func:`dpo` on the best and the worst response of a group.

    With A_i the mean of response i's advantages, the best response has the largest A_i of the group and the worst the
    smallest; of equal ones the first is used. Δ is Σ_t (log_probs − ref_log_probs) of the best minus that of the worst
    response: loss = −log σ(β Δ). Each token of a group has the group's loss, so ``prompt_token_mean`` is the mean over
    groups. A group must be whole; one of one response or with equal A_i has loss 0. The others get no gradient.

    The paper samples two responses, and a model judges which one is better. Dong et al. 2024 (arXiv:2405.07863),
    section 3.2, choose the best and the worst of n by a reward. TRL has groups of two and also trains on equal scores.

    >>> m, one_group = torch.ones(3, 1, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    >>> x, advantages = torch.tensor([[-1.0], [-2.0], [-3.0]]), torch.tensor([[0.0], [1.0], [-1.0]])
    >>> online_dpo(x, torch.zeros(3, 1), advantages, one_group, m, beta=1.0)[0]  # −log σ(−2 + 3)
    tensor([0.3133])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs, ref_log_probs=ref_log_probs, advantages=advantages)
    check_sequences(response_mask, cu_seqlens, group_ids=group_ids)

    has_tokens = sequence_lengths(response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows) > 0
    row_advantages = _row_means(advantages.detach(), response_mask, cu_seqlens, all_reduce_rows)
    low, high = group_bounds(row_advantages, group_ids, has_tokens)
    best = _first_of_group(has_tokens & (row_advantages == high), group_ids)
    worst = _first_of_group(has_tokens & (row_advantages == low), group_ids)

    policy = sequence_sum(upcast(log_probs), response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    ref = sequence_sum(upcast(ref_log_probs).detach(), response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    chosen, rejected = group_sum(policy, group_ids, best), group_sum(policy, group_ids, worst)
    ref_chosen, ref_rejected = group_sum(ref, group_ids, best), group_sum(ref, group_ids, worst)
    losses = dpo(chosen, rejected, ref_chosen, ref_rejected, beta=beta)
    return to_tokens(zero_outside(losses, has_tokens & (low < high)), response_mask, cu_seqlens)


def _first_of_group(members: RowMask, group_ids: GroupIds) -> RowMask:
    """True at the first member of each group."""
    rows = torch.arange(group_ids.shape[0], device=group_ids.device)
    return members & (rows == first_rows(group_ids, members)[group_ids])


def _row_means(
    x: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None, all_reduce_rows: AllReduce | None
) -> PerSequence:
    """The mean over each sequence's valid tokens; 0 if it has none."""
    lengths = sequence_lengths(response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    return sequence_sum(x, response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows) / lengths.clamp(min=1)


def _log_one_plus_sum_exp(x: PerSequence, group_ids: GroupIds, members: RowMask) -> PerSequence:
    """log(1 + Σ e^x) over the members of each row's group."""
    x = zero_outside(x, members)
    _, high = group_bounds(x.detach(), group_ids, members)
    high = high.clamp(min=0)  # the maximum includes 0, because 1 = e^0
    return high + ((-high).exp() + group_sum((x - high).exp(), group_ids, members)).log()


@described
def tail_weighted_sums(
    log_probs: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    tail_weight: float = 0.5,
) -> PerSequence:
    """Log-probs of responses for LD-DPO (arXiv:2409.06411): less weight for tokens that only the longer one has.

    Σ_{t<=l} log π_t + α Σ_{t>l} log π_t, where l is the length of the shortest response of the group, or pair, and α in
    [0, 1] ``tail_weight``. Give it to :func:`dpo` for the policy and for the reference, instead of the sums; α = 1 is
    DPO. TRL's and ms-swift's ``ld_alpha``, and the setting ``tail_weight`` of a run on pairs.

    >>> m = torch.tensor([[True, True, True], [True, False, False]])
    >>> tail_weighted_sums(-torch.ones(2, 3), torch.tensor([0, 0]), m)  # −1 − ½ (1 + 1), −1
    tensor([-2., -1.])
    """
    check_tokens(response_mask, cu_seqlens, log_probs=log_probs)
    check_sequences(response_mask, cu_seqlens, group_ids=group_ids)
    check_range(0, 1, tail_weight=tail_weight)
    x = upcast(log_probs)
    lengths = sequence_lengths(response_mask, cu_seqlens).to(x.dtype)
    shortest, _ = group_bounds(lengths, group_ids, lengths > 0)
    left = discounted_sum(torch.ones_like(x), 1.0, response_mask, cu_seqlens)  # this token and those after it
    in_tail = left <= expand_to_tokens(lengths - shortest, response_mask, cu_seqlens)
    return sequence_sum(torch.where(in_tail, tail_weight * x, x), response_mask, cu_seqlens)
