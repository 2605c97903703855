"""The loss of the critic."""

import torch
from torch import Tensor

from rlprims.masking import check_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask, token_wise


@token_wise
def value(
    new_values: PerToken,
    values: PerToken,
    returns: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip: float | None = None,
    huber_delta: float | None = None,
) -> PerToken:
    """Squared error of the critic with the factor 1/2, optionally clipped as in PPO, or Huber's error instead.

    loss = h(V − R) with h(e) = ½ e². With ``clip=c`` (Dhariwal et al. 2017, baselines): max(h(V − R), h(V' − R)), where
    V' is V clamped to within c of the value when sampled. The ½ is TRL's, OpenRLHF's, verl's and NeMo-RL's; slime omits
    it. With ``huber_delta=δ`` (Huber 1964): h(e) = δ (|e| − ½ δ) where |e| > δ, so that the gradient is never larger
    than δ; AReaL offers it at 10.

    Args:
        new_values: float (B, T) or (N,), critic now; the only gradient.
        values: float, like new_values: critic when sampled; read only if clipped.
        returns: float, like new_values: the target, ``advantages + values`` before whitening.
        response_mask: bool, like new_values.
        cu_seqlens: int (B+1,) if packed; not read.
        clip: c > 0 in units of the value (verl: 0.5), or None.
        huber_delta: δ > 0 in units of the value, or None: the square everywhere.

    Returns:
        float, like new_values; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit; clip <= 0; huber_delta <= 0.

    >>> m = torch.ones(1, 1, dtype=torch.bool)
    >>> value(torch.tensor([[3.0]]), torch.tensor([[0.0]]), torch.tensor([[2.0]]), m, clip=0.5)
    tensor([[1.1250]])
    """
    check_tokens(response_mask, cu_seqlens, new_values=new_values, values=values, returns=returns)
    if clip is not None and clip <= 0:
        raise ValueError(f"clip={clip}, expected a number above 0, or None for no clipping")
    if huber_delta is not None and huber_delta <= 0:
        raise ValueError(f"huber_delta={huber_delta}, expected a number above 0, or None for the squared error")

    new_values = zero_outside(new_values, response_mask)
    returns = zero_outside(returns, response_mask).detach()
    losses = _error(new_values - returns, huber_delta)
    if clip is not None:
        values = zero_outside(values, response_mask).detach()
        clipped_values = new_values.clamp(values - clip, values + clip)
        losses = torch.maximum(losses, _error(clipped_values - returns, huber_delta))
    return losses


def _error(e: Tensor, delta: float | None) -> Tensor:
    """½ e², or δ (|e| − ½ δ) where |e| > δ."""
    squares = e.square() / 2
    return squares if delta is None else torch.where(e.abs() > delta, delta * (e.abs() - delta / 2), squares)
