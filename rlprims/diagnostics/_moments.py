"""Numbers of the valid samples, to the moments that merge."""

from typing import TypeVar

import torch
from torch import Tensor

from rlprims.masking import zero_outside
from rlprims.types import Moments

Kind = TypeVar("Kind", bound=Moments)


def moments(kind: type[Kind], mask: Tensor, *columns: Tensor) -> Kind:
    """One column for each of the K numbers, all shaped like the mask.

    Everything is measured from the column's smallest number, so that a constant one has a scatter of exactly 0: the
    mean of seven 0.1 is not 0.1, and rounding divided by rounding is any number.
    """
    x = torch.stack([zero_outside(column, mask).detach().flatten() for column in columns])
    valid = mask.flatten()
    count = valid.sum().to(x.dtype)
    low = torch.where(valid, x, torch.inf).amin(-1) if x.shape[-1] else x.new_zeros(len(x))
    low = torch.where(count > 0, low, 0.0)
    above = torch.where(valid, x - low[:, None], 0.0)
    mean = above.sum(-1) / count.clamp(min=1)
    centred = torch.where(valid, above - mean[:, None], 0.0)
    return kind(count, low + mean, centred @ centred.T)
