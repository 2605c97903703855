"""See :func:`dead_groups`."""

import torch

from rlprims.filters import nonzero_range
from rlprims.types import GroupIds, Mean, PerSequence


def dead_groups(scores: PerSequence, group_ids: GroupIds, *, tolerance: float = 1e-6) -> Mean:
    """The share of groups without a signal: those that ``filters.nonzero_range`` would drop.

    The parts of a batch merge to the whole if each group is in one part.

    >>> dead_groups(torch.tensor([0.1, 0.1, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])).value()
    tensor(0.5000)
    """
    dead = ~nonzero_range(scores, group_ids, tolerance=tolerance)
    none = torch.zeros_like(dead)
    there = none.scatter(0, group_ids, torch.ones_like(dead))
    return Mean(none.scatter(0, group_ids, dead).sum(), there.sum())
