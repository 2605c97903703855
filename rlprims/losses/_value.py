"""See :func:`value`."""

import torch

from rlprims.masking import check_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask


def value(
    new_values: PerToken,
    values: PerToken,
    returns: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip: float | None = None,
) -> PerToken:
    """Squared error of the critic with the factor 1/2, optionally clipped as in PPO.

    loss = ½ (V − R)². With ``clip=c`` (Dhariwal et al. 2017, baselines): ½ max((V − R)², (V' − R)²), where V' is V
    clamped to within c of the value when sampled. The ½ is TRL's, OpenRLHF's, verl's and NeMo-RL's; slime omits it.

    Args:
        new_values: float (B, T) or (N,), critic now; the only gradient.
        values: float, like new_values: critic when sampled; read only if clipped.
        returns: float, like new_values: the target, ``advantages + values`` before whitening.
        response_mask: bool, like new_values.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
        clip: c > 0 in units of the value (verl: 0.5), or None.

    Returns:
        float, like new_values; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; clip <= 0.

    >>> m = torch.ones(1, 1, dtype=torch.bool)
    >>> value(torch.tensor([[3.0]]), torch.tensor([[0.0]]), torch.tensor([[2.0]]), m, clip=0.5)
    tensor([[1.1250]])
    """
    check_tokens(response_mask, cu_seqlens, new_values=new_values, values=values, returns=returns)
    if clip is not None and clip <= 0:
        raise ValueError(f"clip={clip} must be above 0, or None for no clipping")
    v = zero_outside(new_values, response_mask)
    target = zero_outside(returns, response_mask).detach()
    error = (v - target).square()
    if clip is not None:
        old = zero_outside(values, response_mask).detach()
        error = torch.maximum(error, (v.clamp(old - clip, old + clip) - target).square())
    return error / 2
