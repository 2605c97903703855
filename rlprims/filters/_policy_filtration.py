"""Resampling of rows by their scores: PF-PPO."""

from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlprims.grouping import check_group_ids, group_bounds, group_count, group_sum
from rlprims.kernels import are_readable
from rlprims.masking import check_choice
from rlprims.types import GroupIds, PerSequence

Rows: TypeAlias = Annotated[Tensor, "int64 (B,)"]
Weighting: TypeAlias = Literal["pow", "max_min", "max_random"]
Scope: TypeAlias = Literal["batch", "group"]

_MIN_WEIGHT = 1e-8
"""Added to every known row's weight: if all weights are 0, every row is equally likely."""


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
    from all the other groups: each of them is equally likely, then a row by its weight.

    Index every tensor with the result, ``x[policy_filtration(...)]``, after the advantages are computed: copies of a
    row have no variance.

    Args:
        scores: float (B,).
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        generator: on the device of the scores.
        weights: the weight of a score: "pow", "max_min" or "max_random".
        power: the exponent of "pow".
        over: "batch" or "group": rows are drawn from the batch or the group, and best and worst are those in it.

    Returns:
        int64 (B,), row numbers; with ``over="group"`` drawn rows replace the rows of the same group.

    Raises:
        ValueError: wrong shapes or dtypes; an unknown option; no score of the batch is finite (on an
            accelerator, where values are not read, the last row is returned then).

    >>> scores, ids = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 3.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    >>> policy_filtration(scores, ids, over="group", generator=torch.Generator().manual_seed(0))
    tensor([0, 0, 0, 5, 5, 5])
    """
    check_choice("weights", weights, Weighting)
    check_choice("over", over, Scope)
    if scores.shape != group_ids.shape:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}, group_ids has {tuple(group_ids.shape)}: expected (B,) for both"
        )
    check_group_ids(group_ids)
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

    # In the cumulated shares every pool with a known score has an interval of length 1. A row is drawn by a random
    # point in the interval of its pool, or in all intervals if its pool has none. All tensors are sorted by pool.
    order = pool.argsort(stable=True)
    pool = pool[order]
    cumulated = pad(share[order].cumsum(0), (1, 0))
    first = torch.searchsorted(pool, pool)
    begin, end = cumulated[first], cumulated[first + group_count(pool)]
    is_empty = begin == end
    begin, end = torch.where(is_empty, 0.0, begin), torch.where(is_empty, cumulated[-1], end)
    point = begin + torch.rand(rows, generator=generator, device=s.device, dtype=s.dtype) * (end - begin)
    point = torch.minimum(point, torch.nextafter(end, begin))  # rounding must not give a point of the next pool
    drawn = order[torch.searchsorted(cumulated[1:].contiguous(), point, right=True).clamp(max=rows - 1)]
    return torch.empty_like(order).index_put((order,), drawn)
