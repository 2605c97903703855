"""Resampling of rows by their scores: PF-PPO."""

from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.grouping import check_rows, group_bounds, group_sum
from rlprims.kernels import are_readable
from rlprims.masking import check_choice, check_finite
from rlprims.types import GroupIds, PerSequence

Rows: TypeAlias = Annotated[Tensor, "int64 (B,)"]
Weighting: TypeAlias = Literal["pow", "max_min", "max_random"]
Scope: TypeAlias = Literal["batch", "group"]

_MIN_WEIGHT = 1e-8
"""Added to every known row's weight: if all weights are 0, every row is equally likely."""


@described
def policy_filtration(
    scores: PerSequence,
    group_ids: GroupIds,
    *,
    generator: torch.Generator,
    weights: Weighting = "pow",
    power: float = 2.0,
    over: Scope = "batch",
) -> Rows:
    """Resampling by score, PF-PPO, Zhang et al. 2024 (arXiv:2409.06957): train on the rows whose reward is reliable.

    B rows are drawn with replacement. The weight of a row is |s|^power ("pow"); 1 for the best and the worst and 0
    between ("max_min"); or 0.4 for the best and 0.1 for every other row ("max_random"). verl 0.9
    (``compute_pf_ppo_reweight_data``) draws from the whole batch, so a prompt may have no row left, and the best row is
    the best of all prompts. ``over="group"`` draws each group's rows from that group, and its size stays.

    A row of unknown score (NaN, infinite) is never drawn. If a group has no other rows, the rows in its place are drawn
    from all the other groups: each of them is equally likely, then a row by its weight. Index every tensor with the
    result, ``x[policy_filtration(...)]``, after the advantages are computed: copies of a row have no variance.

    Args:
        generator: on the device of the scores.
        weights: the weight of a score: "pow", "max_min" or "max_random".
        over: "batch" or "group": rows are drawn from the batch or the group, and best and worst are those in it.

    Returns:
        row numbers; with ``over="group"`` drawn rows replace the rows of the same group.

    Raises:
        ValueError: wrong shapes or dtypes; an unknown option; no score of the batch is finite (on an accelerator, where
            values are not read, any rows are returned then).

    >>> scores, ids = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 3.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    >>> policy_filtration(scores, ids, over="group", generator=torch.Generator().manual_seed(0))
    tensor([0, 0, 0, 5, 5, 5])
    """
    check_choice("weights", weights, Weighting)
    check_choice("over", over, Scope)
    check_finite(power=power)
    check_rows(group_ids, scores=scores)
    rows = scores.shape[0]
    known = scores.isfinite()
    if are_readable(scores) and rows and not known.any():
        raise ValueError(f"none of the {rows} scores is finite, expected at least one row to draw")
    pool = group_ids if over == "group" else torch.zeros_like(group_ids)
    s = scores.detach().double()
    low, high = group_bounds(s, pool, known)
    if weights == "pow":
        weight = s.abs() ** power
    elif weights == "max_min":
        weight = ((s == low) | (s == high)).double()
    else:
        weight = torch.where(s == high, 0.4, torch.full_like(s, 0.1))
    weight = torch.where(known, weight + _MIN_WEIGHT, 0.0)
    total = group_sum(weight, pool)
    share = weight / torch.where(total == 0, 1.0, total)

    if rows == 0:
        return group_ids.clone()
    none_known = (total == 0).all()
    anywhere = torch.multinomial(torch.where(none_known, 1.0, share), rows, replacement=True, generator=generator)
    if over == "batch":
        return anywhere
    return torch.where(total == 0, anywhere, _drawn_from_own_group(share, group_ids, generator))


def _drawn_from_own_group(share: PerSequence, group_ids: GroupIds, generator: torch.Generator) -> Rows:
    """For each row a row of its group, by the shares; undefined for a group without a share."""
    # In the cumulated shares each group has an interval of length 1, where a random point is a row. Rows without a
    # share are first in their group, so that a point which rounding moved to the end of the interval is still a row.
    order = (share > 0).long().argsort(stable=True)
    order = order[group_ids[order].argsort(stable=True)]
    group = group_ids[order]
    first, last = torch.searchsorted(group, group), torch.searchsorted(group, group, right=True) - 1
    cumulated = share[order].cumsum(0)
    begin = torch.where(first > 0, cumulated[first - 1], 0.0)
    u = torch.rand(share.shape, generator=generator, device=share.device, dtype=share.dtype)
    point = begin + u * (cumulated[last] - begin)
    drawn = torch.searchsorted(cumulated, point, right=True).clamp(first, last)
    return torch.empty_like(order).index_put((order,), order[drawn])
