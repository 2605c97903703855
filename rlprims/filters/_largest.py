"""The tokens of a batch that have the largest numbers."""

import torch
from torch import Tensor

from rlprims.types import TokenMask


def largest(x: Tensor, mask: TokenMask, count: Tensor) -> TokenMask:
    """True on the ``count`` (at least 1) largest valid numbers of the whole batch, and on those that equal the last.

    So the choice depends neither on the order of the tokens nor on padding.

    >>> largest(torch.tensor([[3, 9, 5, 5]]), torch.tensor([[True, False, True, True]]), torch.tensor(1)).tolist()
    [[False, False, True, True]]
    """
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    order = torch.where(mask, x, lowest).flatten().sort(descending=True).values
    order = torch.cat([order, order.new_full((1,), lowest)])  # so that an empty batch has one to look at
    return mask & (x >= order.gather(0, count.reshape(1) - 1))


def share(mask: TokenMask, fraction: float, less: int = 0) -> Tensor:
    """⌊fraction · (valid tokens − less)⌋, int64 (); the little that is added is for the rounding of the product."""
    return (fraction * (mask.sum() - less) + 1e-4).floor().long()
