"""See :func:`policy_filtration`."""

from typing import Annotated, Literal, TypeAlias

import torch
from torch import Tensor

from rlprims.grouping import check_group_ids, group_bounds
from rlprims.masking import upcast
from rlprims.types import GroupIds, PerSequence

Rows: TypeAlias = Annotated[Tensor, "int64 (B,)"]

_FLOOR = 1e-8  # where all weights are 0, any row is as good


def policy_filtration(
    scores: PerSequence,
    group_ids: GroupIds,
    *,
    generator: torch.Generator,
    weights: Literal["pow", "max_min", "max_random"] = "pow",
    power: float = 2.0,
    over: Literal["batch", "group"] = "batch",
) -> Rows:
    """Resampling by score, PF-PPO, Zhang et al. 2024 (arXiv:2409.06957): train on the rows whose reward is reliable.

    As many rows as there are, drawn with replacement. The weight of a row is |s|^power ("pow"); 1 for the best and the
    worst, 0 between ("max_min"); or 0.4 for the best and 0.1 for every other ("max_random"). verl 0.9
    (``compute_pf_ppo_reweight_data``) draws from the whole batch, so that a prompt may vanish and best means best of
    all prompts; ``over="group"`` draws each group's rows from that group, and its size stays.

    Take the rows of every tensor, ``x[policy_filtration(...)]``, after the advantages: copies have no variance.

    Args:
        scores: float (B,). A row of unknown score (NaN, infinite) is not drawn.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        generator: on the device of the scores.
        weights: which rows are worth more.
        power: of "pow".
        over: among which rows best and worst are sought, and from which a row is drawn.

    Returns:
        int64 (B,), numbers of rows; those of a group stand where its rows stood if ``over="group"``.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> scores, ids = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 3.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    >>> policy_filtration(scores, ids, over="group", generator=torch.Generator().manual_seed(0))
    tensor([0, 0, 0, 5, 5, 5])
    """
    if scores.shape != group_ids.shape:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}, group_ids has {tuple(group_ids.shape)}: both are (B,)"
        )
    check_group_ids(group_ids)
    pool = group_ids if over == "group" else torch.zeros_like(group_ids)
    known = scores.isfinite()
    s = upcast(scores)
    low, high = group_bounds(s, pool, known)
    if weights == "pow":
        weight = s.abs() ** power
    elif weights == "max_min":
        weight = ((s == low) | (s == high)).to(s.dtype)
    else:
        weight = torch.where(s == high, 0.4, 0.1)
    weight = torch.where(known, weight.double() + _FLOOR, 0.0)

    # Each pool is a stretch of the cumulated weights; a row is drawn by a point in the stretch of its pool.
    order = pool.argsort(stable=True)
    pool = pool[order]
    upto = weight[order].cumsum(0)
    sizes = torch.zeros_like(pool).index_add(0, pool, torch.ones_like(pool))
    last = sizes.cumsum(0) - 1
    begin = torch.cat([upto.new_zeros(1), upto])[last + 1 - sizes][pool]
    point = torch.rand(len(s), generator=generator, device=s.device, dtype=upto.dtype)
    found = torch.searchsorted(upto, begin + point * (upto[last][pool] - begin), right=True)
    drawn = order[torch.minimum(found, last[pool])]
    return torch.empty_like(order).index_put((order,), drawn)
