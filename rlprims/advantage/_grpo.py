"""See :func:`grpo`."""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rlprims._groups import Groups, Numbers, constant, moments_of, on_groups, squares_of, variance_of
from rlprims.advantage._moments import moments
from rlprims.advantage._responses import paid, response_scores
from rlprims.advantage._rloo import others
from rlprims.grouping import group_centred
from rlprims.types import CuSeqlens, GroupIds, PerSequence, PerToken, RowMask, TokenMask


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
    singleton: Literal["zero", "raw", "error"] = "zero",
    tolerance: float = 1e-6,
    baseline: Literal["mean", "leave_one_out"] = "mean",
    std_over: Literal["group", "batch", "batch_centred"] = "group",
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerToken:
    """Group-relative advantage, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2.

    With s_i = Σ_t r_it the response's reward and μ, σ over the group: A_i = (s_i − μ) / (σ + ε) on each of its tokens.
    ``normalize_std=False`` is Dr. GRPO's A_i = s_i − μ (Liu et al. 2025, arXiv:2503.20783, eq. 2).

    Where sources disagree: σ has divisor n − 1 as in verl, TRL, OpenRLHF, SkyRL and slime (``ddof=0``: rllm,
    open-instruct); ε = 1e-6 is verl's, TRL has 1e-4, OpenRLHF 1e-9. A group of equal rewards gets exactly 0 by a range
    test, where all of those can amplify its rounding residue.

    A deviation over the whole batch does not blow up the groups that nearly agree (Liu et al. 2025, arXiv:2508.08221):
    "batch" is σ of the raw rewards, as TRL's ``scale_rewards="batch"``, and so grows with the distance between prompts;
    "batch_centred" is σ of s_i − μ_group, as ms-swift's, and does not. ``baseline="leave_one_out"`` is μ of the other
    samples, n/(n−1) · (s_i − μ): PipelineRL's. NeMo-RL leaves the sample out of σ too, which then can vanish: not here.
    With one group for all rows it is the z-score of the batch.

    Args:
        rewards: float (B, T) or (N,), per token.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.
        normalize_std: divide by σ + ε.
        ddof: σ's divisor is n − ddof.
        eps: ε, in units of the reward.
        singleton: a group of one has no baseline: "zero" (A = 0), "raw" (A = s, as verl), or "error".
        tolerance: the group is constant if max − min <= tolerance · max(1, |s|).
        baseline: μ over the whole group, or over the others.
        std_over: what σ is the deviation of: the group's rewards, the batch's, or the batch's less their groups' means.
        all_reduce: sums a tensor over the ranks that share the batch, for σ of the batch; None: this tensor is it.

    Returns:
        float, like rewards; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; a group of one under ``singleton="error"``.

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> grpo(torch.tensor([[1.0], [0.0], [0.0], [0.0]]), torch.zeros(4, dtype=torch.int64), m).T
    tensor([[ 1.5000, -0.5000, -0.5000, -0.5000]])
    """
    s, response_mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    a = standard_scores(
        s,
        group_ids,
        valid_rows,
        normalize_std=normalize_std,
        ddof=ddof,
        eps=eps,
        singleton=singleton,
        tolerance=tolerance,
        baseline=baseline,
        std_over=std_over,
        all_reduce=all_reduce,
    )
    return paid(a, response_mask, cu_seqlens)


def standard_scores(
    s: PerSequence,
    group_ids: GroupIds,
    valid_rows: RowMask | None,
    *,
    normalize_std: bool,
    ddof: int,
    eps: float,
    singleton: Literal["zero", "raw", "error"],
    tolerance: float,
    baseline: Literal["mean", "leave_one_out"] = "mean",
    std_over: Literal["group", "batch", "batch_centred"] = "group",
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerSequence:
    """:func:`grpo` of one number per response."""
    whole: Tensor | None = None
    if normalize_std and std_over != "group":
        raw = s if std_over == "batch" else group_centred(s, group_ids, valid_rows)
        valid = torch.ones_like(s, dtype=torch.bool) if valid_rows is None else valid_rows
        whole = moments(raw, valid, ddof=ddof, all_reduce=all_reduce).variance

    def scores(g: Groups, s: Numbers) -> tuple[Numbers]:
        group = moments_of(g, s)
        if singleton == "error" and bool((group.size == 1).any()):
            raise ValueError(
                "a group has one valid row, so no baseline: sample more per prompt, or singleton='zero'|'raw'"
            )
        a = group.centred
        if baseline == "leave_one_out":
            a = a * g.rows(others(g, group.size))
        squares = squares_of(g, group)
        silent = constant(g, s, tolerance, squares, group.size)  # as is a group of one
        if normalize_std:
            square = variance_of(g, squares, group.size, ddof) if whole is None else 0 * group.size + g.scalar(whole)
            # To divide by infinity makes exactly 0, and keeps the root of 0 out of the gradient.
            a = a / g.rows(g.where(silent, math.inf, square) ** 0.5 + eps)
        else:
            a = g.where(g.rows(silent), 0.0, a)
        return (g.where(g.rows(group.size <= 1), s, a) if singleton == "raw" else a,)

    return on_groups(scores, group_ids, valid_rows, s)[0]
