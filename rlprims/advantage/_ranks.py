"""The rows of each group in the order of their numbers."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlprims.types import CuSeqlens, GroupIds, PerSequence


class Ranks(NamedTuple):
    """``order`` lists the rows, group after group and ascending inside each; group g is ``cu[g]:cu[g+1]`` of it.

    ``sizes`` (B,) and ``ranks`` (B,), from 0, are in that order too.
    """

    order: Tensor
    cu: CuSeqlens
    sizes: Tensor
    ranks: Tensor

    def sort(self, x: PerSequence) -> PerSequence:
        return x[self.order]

    def unsort(self, x: PerSequence) -> PerSequence:
        return torch.zeros_like(x).index_put((self.order,), x)


def group_ranks(x: PerSequence, group_ids: GroupIds) -> Ranks:
    """Equal numbers stand in the order of their rows.

    >>> group_ranks(torch.tensor([3.0, 9.0, 1.0]), torch.tensor([0, 1, 0]))
    Ranks(order=tensor([2, 0, 1]), cu=tensor([0, 2, 3, 3]), sizes=tensor([2, 2, 1]), ranks=tensor([0, 1, 0]))
    """
    by_value = x.argsort(stable=True)
    order = by_value[group_ids[by_value].argsort(stable=True)]
    counts = torch.zeros_like(group_ids).index_add(0, group_ids, torch.ones_like(group_ids))
    cu = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    owner = group_ids[order]
    return Ranks(order, cu, counts[owner], torch.arange(len(x), device=x.device) - cu[owner])
