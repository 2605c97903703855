"""See :func:`share` and :func:`nonfinite`."""

import torch

from rlprims.types import Mean, PerToken, RowMask, TokenMask


def share(rows: RowMask) -> Mean:
    """The share of rows that are True.

    >>> share(torch.tensor([True, False])).value()
    tensor(0.5000)
    """
    return Mean(rows.sum(), torch.tensor(len(rows), device=rows.device))


def nonfinite(x: PerToken, response_mask: TokenMask) -> Mean:
    """The share of valid tokens whose number is NaN or infinite. The primitives hand such a number on; here it is seen.

    >>> nonfinite(torch.tensor([[1.0, torch.nan, torch.nan]]), torch.tensor([[True, True, False]])).value()
    tensor(0.5000)
    """
    return Mean((response_mask & ~x.isfinite()).sum(), response_mask.sum())
