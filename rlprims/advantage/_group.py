"""Estimators that compare the responses to one prompt: GRPO, RLOO, GPG, OPO, and quantile baselines.

They compute one advantage per response, that of each of its tokens, from the scores s_i = Σ_t r_it of its group.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.grouping import (
    check_group_ids,
    group_centred,
    group_count,
    group_ranks,
    group_std,
    group_sum,
    is_constant,
    safe_sqrt,
    variance_of_centred,
)
from rlprims.layout import expand_to_tokens, sequence_lengths, sequence_sum, to_tokens
from rlprims.masking import batch_moments, check_choice, check_deviation, check_sequences, check_tokens, zero_outside
from rlprims.types import CuSeqlens, GroupIds, PerSequence, PerToken, RowMask, TokenMask

Singleton: TypeAlias = Literal["zero", "raw"]
SingletonOrError: TypeAlias = Literal["zero", "raw", "error"]
Baseline: TypeAlias = Literal["mean", "leave_one_out"]
StdOver: TypeAlias = Literal["group", "batch", "batch_centred"]
Informative: TypeAlias = Literal["varied_group", "nonzero_reward"]
KeepBy: TypeAlias = Literal["length", "reward_per_token"]


def response_scores(
    rewards: PerToken, group_ids: GroupIds, mask: TokenMask, cu_seqlens: CuSeqlens | None, valid_rows: RowMask | None
) -> tuple[PerSequence, TokenMask]:
    """s_i = Σ_t r_it, 0 for rows that are not valid, and the mask of the tokens of valid rows.

    >>> rewards, mask = torch.tensor([[1.0, 2.0], [torch.nan, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> response_scores(rewards, torch.tensor([0, 0]), mask, None, torch.tensor([True, False]))
    (tensor([3., 0.]), tensor([[ True,  True],
            [False, False]]))
    """
    check_tokens(mask, cu_seqlens, rewards=rewards)
    mask = tokens_of_valid_rows(mask, group_ids, cu_seqlens, valid_rows)
    return sequence_sum(rewards, mask, cu_seqlens), mask


def tokens_of_valid_rows(
    response_mask: TokenMask, group_ids: GroupIds, cu_seqlens: CuSeqlens | None, valid_rows: RowMask | None
) -> TokenMask:
    """The mask, False on rows that are not valid. ``group_ids`` and ``valid_rows`` are checked.

    >>> mask, cu_seqlens = torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 3])
    >>> tokens_of_valid_rows(mask, torch.tensor([0, 0]), cu_seqlens, torch.tensor([True, False]))
    tensor([ True, False, False])
    """
    check_sequences(response_mask, cu_seqlens, group_ids=group_ids)
    check_group_ids(group_ids, valid_rows)
    valid = None if valid_rows is None else expand_to_tokens(valid_rows, response_mask, cu_seqlens)
    return response_mask if valid is None else response_mask & valid


@described
def grpo(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: SingletonOrError = "zero",
    tolerance: float = 1e-6,
    baseline: Baseline = "mean",
    std_over: StdOver = "group",
    keep: int | None = None,
    keep_by: KeepBy = "length",
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerToken:
    """Group-relative advantage, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2.

    With s_i = Σ_t r_it the response's reward and μ, σ over the group: A_i = (s_i − μ) / (σ + ε) on each of its tokens.
    ``normalize_std=False`` is Dr. GRPO's A_i = s_i − μ (Liu et al. 2025, arXiv:2503.20783, eq. 2).

    Where sources disagree: σ has divisor n − 1 as in verl, TRL, OpenRLHF, SkyRL and slime (``ddof=0``: rllm,
    open-instruct); ε = 1e-6 is verl's, TRL has 1e-4, OpenRLHF 1e-9. A group of equal rewards gets exactly 0 here,
    because its range is tested; the other libraries can amplify the rounding error of its mean.

    The σ of the whole batch does not enlarge the small differences of nearly constant groups (Liu et al. 2025,
    arXiv:2508.08221). ``std_over="batch"`` is σ of the raw rewards, as TRL's ``scale_rewards="batch"``; it grows with
    the differences between prompts. "batch_centred" is σ of s_i − μ_group, as in ms-swift; it does not.
    ``baseline="leave_one_out"`` uses μ of the other samples, A_i = n/(n−1) · (s_i − μ), as PipelineRL.

    ``keep=k`` is GFPO (Shrivastava et al. 2025, arXiv:2508.09726): only the k shortest responses of a group count, or
    those with the largest s_i / length (``keep_by="reward_per_token"``), of equal ones the first; the others get 0.

    Args:
        singleton: a group of one has no baseline: "zero" (A = 0), "raw" (A = s, as verl), or "error". "error" reads the
            sizes of the groups from the device and cannot be compiled.

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> grpo(torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.zeros(4, dtype=torch.int64), m).T
    tensor([[ 1.5000, -0.5000, -0.5000, -0.5000]])
    """
    check_choice("singleton", singleton, SingletonOrError)
    check_choice("baseline", baseline, Baseline)
    check_choice("std_over", std_over, StdOver)
    check_choice("keep_by", keep_by, KeepBy)
    check_deviation(ddof, eps=eps)
    if keep is not None:
        s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
        valid_rows = _kept(s, sequence_lengths(mask, cu_seqlens), group_ids, keep, keep_by)
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    n = group_count(group_ids, valid_rows)
    if singleton == "error" and bool((n == 1).any()):
        raise ValueError(
            "a group has one valid row, expected at least two for a baseline: sample more responses per prompt, or use "
            "singleton='zero' or 'raw'"
        )
    a = centred = group_centred(s, group_ids, valid_rows)
    if baseline == "leave_one_out":
        a = centred * n / (n - 1).clamp(min=1)
    constant = is_constant(s, group_ids, valid_rows, tolerance=tolerance)
    if normalize_std:
        if std_over == "group":
            std = safe_sqrt(variance_of_centred(centred.double(), group_ids, valid_rows, ddof=ddof))
        else:
            rows = torch.ones_like(constant) if valid_rows is None else valid_rows
            x = s if std_over == "batch" else centred
            std = safe_sqrt(batch_moments(x, rows, ddof=ddof, all_reduce=all_reduce).variance)
        a = divide_by_std(a, std.to(s.dtype), eps, constant)
    a = torch.where(constant, 0.0, a)
    a = torch.where(n <= 1, s, a) if singleton == "raw" else a
    return to_tokens(a, mask, cu_seqlens)


def _kept(s: PerSequence, lengths: PerSequence, group_ids: GroupIds, keep: int, by: KeepBy) -> RowMask:
    """The ``keep`` rows of each group that are first by their length, or by s / length; never one without a token."""
    if keep < 2:
        raise ValueError(f"keep={keep}, expected at least 2: one response has nothing to be compared with")
    key = lengths.to(s.dtype) if by == "length" else -s / lengths.clamp(min=1)
    ranks = group_ranks(key, group_ids, lengths > 0)
    return (lengths > 0) & ranks.unsort(ranks.ranks < keep)


def z_scores(s: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None, **options: Any) -> PerSequence:
    """:func:`grpo` of one score per row: (s − μ) / (σ + ε); 0 for rows that are not valid."""
    mask = torch.ones_like(s, dtype=torch.bool)
    return grpo(s[:, None], group_ids, mask[:, None], valid_rows=valid_rows, **options)[:, 0]


def divide_by_std(a: PerSequence, std: Tensor, eps: float, constant: RowMask) -> PerSequence:
    """a / (σ + ε); a, without a gradient to σ, if the group is constant.

    >>> divide_by_std(torch.tensor([3.0, 0.0]), torch.tensor([2.0, 0.0]), 0.0, torch.tensor([False, True]))
    tensor([1.5000, 0.0000])
    """
    return a / torch.where(constant, 1.0, std + eps)


@described
def rloo(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
) -> PerToken:
    """REINFORCE leave-one-out, Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740), eq. 8.

    A_i = s_i − mean of the other samples' s_j = n/(n−1) · (s_i − μ), with s_i = Σ_t r_it. A group of one has no
    baseline: 0 (as SkyRL, tunix and verl's vectorized form; verl's default form and rllm keep the raw reward).

    >>> m = torch.ones(3, 1, dtype=torch.bool)
    >>> rloo(torch.tensor([[1.0], [0.0], [0.0]]), torch.zeros(3, dtype=torch.int64), m).T
    tensor([[ 1.0000, -0.5000, -0.5000]])
    """
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    n = group_count(group_ids, valid_rows)
    return to_tokens(group_centred(s, group_ids, valid_rows) * n / (n - 1).clamp(min=1), mask, cu_seqlens)


@described
def gpg(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    informative: Informative = "varied_group",
    singleton: Singleton = "zero",
    tolerance: float = 1e-6,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerToken:
    """Group policy gradient, Chu et al. 2025 (arXiv:2504.02546): centred rewards, rescaled for groups of equal rewards.

    A_i = α (s_i − μ_group) with α = B / (B − M). M of the batch's B responses are in groups of equal rewards and get 0.
    verl 0.9 uses the number of responses with a nonzero reward as B − M (``informative="nonzero_reward"``). This number
    differs even for rewards of 0 and 1, and gives α = 1 for rewards of −1 and 1. The paper's divisor F_norm is 1 here;
    for the group's deviation see :func:`grpo`.

    Args:
        singleton: a group of one has no baseline: "zero" (A = 0) or "raw" (A = α s, as verl).

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> gpg(torch.tensor([[1.0], [0.0], [1.0], [1.0]]), torch.tensor([0, 0, 1, 1]), m).T
    tensor([[ 1., -1.,  0.,  0.]])
    """
    check_choice("informative", informative, Informative)
    check_choice("singleton", singleton, Singleton)
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    is_singleton = group_count(group_ids, valid_rows) <= 1
    constant = is_constant(s, group_ids, valid_rows, tolerance=tolerance) | is_singleton
    rows = torch.ones_like(constant) if valid_rows is None else valid_rows
    is_informative = rows & (~constant if informative == "varied_group" else s != 0)

    counts = torch.stack([rows.sum(), is_informative.sum()]).to(s.dtype)
    responses, informative_responses = counts if all_reduce is None else all_reduce(counts)
    a = torch.where(constant, 0.0, group_centred(s, group_ids, valid_rows))
    if singleton == "raw":
        a = torch.where(is_singleton, s, a)
    alpha = responses / informative_responses.clamp(min=1)
    return to_tokens(alpha * a, mask, cu_seqlens)


@described
def opo(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    singleton: Singleton = "zero",
) -> PerToken:
    """On-policy RL with optimal baseline, Hao et al. 2025 (arXiv:2505.23585): a baseline weighted by length.

    A_i = s_i − Σ_j L_j s_j / Σ_j L_j over the group, with s_i = Σ_t r_it and L_i the valid tokens of response i. The
    baseline of least variance weights rewards by the squared norm of the response's gradient; the paper assumes that
    this norm is proportional to the length. The baseline includes s_i, as in :func:`grpo`, which scales the expected
    gradient by about 1 − 1/n. A group with at most one response that has tokens gets 0; verl 0.9: NaN if none has.

    >>> m = torch.tensor([[True, True, True], [True, False, False]])
    >>> opo(torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), torch.tensor([0, 0]), m)
    tensor([[ 0.2500,  0.2500,  0.2500],
            [-0.7500,  0.0000,  0.0000]])
    """
    check_choice("singleton", singleton, Singleton)
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    lengths = sequence_lengths(mask, cu_seqlens).to(s.dtype)
    # The group's mean is subtracted first, so that equal rewards give exactly 0.
    centred = group_centred(s, group_ids, valid_rows)
    weighted_sum = group_sum(zero_outside(lengths * centred, lengths > 0), group_ids, valid_rows)
    a = centred - weighted_sum / group_sum(lengths, group_ids, valid_rows).clamp(min=1)
    is_singleton = group_count(group_ids, valid_rows) <= 1
    return to_tokens(torch.where(is_singleton, s if singleton == "raw" else 0.0, a), mask, cu_seqlens)


@described
def quantile_baseline(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    level: float = 0.4,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    tolerance: float = 1e-6,
) -> PerToken:
    """Quantile advantage estimation (arXiv:2509.22611): the baseline is a quantile of the group.

    A_i = (s_i − Q) / (σ + ε) with s_i = Σ_t r_it and Q = inf {x: F(x) >= level} over the group's rewards: the smallest
    reward x such that a share of at least ``level`` of the rewards is <= x; in (0, 1], the paper's K. With rewards of 0
    and 1 and a share p of correct responses: if p <= 1 − level, Q = 0 and only correct responses have an advantage,
    which is positive; else Q = 1 and only wrong responses have one, which is negative. The default interpolation of
    ``torch.quantile`` would give every response an advantage.

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> quantile_baseline(torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.zeros(4, dtype=torch.int64), m).T
    tensor([[2.0000, 0.0000, 0.0000, 0.0000]])
    """
    if not 0 < level <= 1:
        raise ValueError(f"level={level}, expected a number above 0 and at most 1: the share of rewards <= Q")
    check_deviation(ddof, eps=eps)
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    ranks = group_ranks(s, group_ids, valid_rows)
    sorted_scores = ranks.sort(s)
    # Rank ⌈level · n⌉, counted from 1. 1e-4 is subtracted because level · n is rounded: ⌈0.6 · 5⌉ must be 3, not 4.
    rank = (level * ranks.sizes.double() - 1e-4).ceil().long().clamp(min=1) - 1
    first = torch.arange(s.shape[0], device=s.device) - ranks.ranks
    a = ranks.unsort(sorted_scores - sorted_scores[first + rank])
    constant = is_constant(s, group_ids, valid_rows, tolerance=tolerance) | (group_count(group_ids, valid_rows) <= 1)
    if normalize_std:
        a = divide_by_std(a, group_std(s, group_ids, valid_rows, ddof=ddof), eps, constant)
    return to_tokens(torch.where(constant, 0.0, a), mask, cu_seqlens)
