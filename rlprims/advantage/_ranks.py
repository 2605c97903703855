"""The rows of each group in the order of their numbers."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlprims.grouping import group_count
from rlprims.types import CuSeqlens, GroupIds, PerSequence, RowMask


class Ranks(NamedTuple):
    """``order`` lists the rows, group after group and ascending inside each; group g is ``cu[g]:cu[g+1]`` of it.

    ``sizes`` (B,), of valid rows, and ``ranks`` (B,), from 0, are in that order too.
    """

    order: Tensor
    cu: CuSeqlens
    sizes: Tensor
    ranks: Tensor

    def sort(self, x: PerSequence) -> PerSequence:
        return x[self.order]

    def unsort(self, x: PerSequence) -> PerSequence:
        return torch.zeros_like(x).index_put((self.order,), x)


def group_ranks(x: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None) -> Ranks:
    """Equal numbers stand in the order of their rows; rows that are not valid stand last and are not in the sizes.

    >>> group_ranks(torch.tensor([3.0, 9.0, 1.0]), torch.tensor([0, 1, 0]), None)
    Ranks(order=tensor([2, 0, 1]), cu=tensor([0, 2, 3, 3]), sizes=tensor([2, 2, 1]), ranks=tensor([0, 1, 0]))
    """
    order = x.argsort(stable=True)
    if valid_rows is not None:
        order = order[(~valid_rows[order]).long().argsort(stable=True)]
    order = order[group_ids[order].argsort(stable=True)]
    counts = torch.zeros_like(group_ids).index_add(0, group_ids, torch.ones_like(group_ids))
    cu = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    ranks = torch.arange(len(x), device=x.device) - cu[group_ids[order]]
    return Ranks(order, cu, group_count(group_ids, valid_rows)[order], ranks)
