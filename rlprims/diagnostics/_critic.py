"""See :func:`explained_variance`."""

from rlprims.diagnostics._moments import moments
from rlprims.masking import zero_outside
from rlprims.types import ExplainedVariance, PerToken, TokenMask


def explained_variance(values: PerToken, returns: PerToken, response_mask: TokenMask) -> ExplainedVariance:
    """1 − Var(R − V) / Var(R) over the valid tokens: 1 is a perfect critic, 0 no better than a constant; 0 if R is one.

    >>> import torch
    >>> r = torch.tensor([[1.0, 3.0]])
    >>> explained_variance(r, r, torch.tensor([[True, True]])).value()
    tensor(1.)
    """
    r = zero_outside(returns, response_mask)
    return moments(ExplainedVariance, response_mask, r, r - zero_outside(values, response_mask))
