"""See :func:`token_mean` and :func:`token_max`."""

from rlprims.masking import zero_outside
from rlprims.types import Max, Mean, PerToken, TokenMask


def token_mean(x: PerToken, response_mask: TokenMask) -> Mean:
    """Mean over the valid tokens, as a metric: of entropies, say, or of values.

    >>> import torch
    >>> token_mean(torch.tensor([[1.0, 9.0]]), torch.tensor([[True, False]])).value()
    tensor(1.)
    """
    return Mean(zero_outside(x, response_mask).sum().detach(), response_mask.sum())


def token_max(x: PerToken, response_mask: TokenMask) -> Max:
    """Largest over the valid tokens, of numbers that are at least 0; 0 without a token.

    >>> import torch
    >>> token_max(torch.tensor([[1.0, 9.0]]), torch.tensor([[True, False]])).value()
    tensor(1.)
    """
    kept = zero_outside(x, response_mask).detach()
    return Max(kept.amax() if kept.numel() else kept.new_zeros(()))
