"""See :func:`value`."""

from functools import partial

import torch
from torch import Tensor

from rlprims.losses._with_slope import with_slope
from rlprims.masking import check_tokens, upcast
from rlprims.types import CuSeqlens, PerToken, TokenMask


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
    it. With ``huber_delta=δ`` (Huber 1964): h(e) = δ (|e| − ½ δ) where |e| > δ, so that no target pulls with more than
    δ; AReaL offers it at 10.

    Args:
        new_values: float (B, T) or (N,), critic now; the only gradient.
        values: float, like new_values: critic when sampled; read only if clipped.
        returns: float, like new_values: the target, ``advantages + values`` before whitening.
        response_mask: bool, like new_values.
        cu_seqlens: int (B+1,) if packed; tokens are independent, so it is not read.
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
        raise ValueError(f"clip={clip} must be above 0, or None for no clipping")
    if huber_delta is not None and huber_delta <= 0:
        raise ValueError(f"huber_delta={huber_delta} must be above 0, or None for the squared error")
    if clip is None:
        return with_slope(partial(_error, huber_delta=huber_delta), response_mask, new_values, returns)
    rule = partial(_clipped, clip=clip, huber_delta=huber_delta)
    return with_slope(rule, response_mask, new_values, returns, values)


def _error(new_values: Tensor, returns: Tensor, *, huber_delta: float | None) -> tuple[Tensor, Tensor]:
    e = upcast(new_values) - upcast(returns)
    if huber_delta is None:
        return e.square().div_(2), e
    near = e.clamp(-huber_delta, huber_delta)
    return (near / -2).add_(e).mul_(near), near  # ½ e² within δ, beyond it δ (|e| − ½ δ)


def _clipped(
    new_values: Tensor, returns: Tensor, values: Tensor, *, clip: float, huber_delta: float | None
) -> tuple[Tensor, Tensor]:
    """Where V' is the worse it is a constant; within the clip V' is V."""
    free, slope = _error(new_values, returns, huber_delta=huber_delta)
    old = upcast(values)
    held, _ = _error(upcast(new_values).clamp(old - clip, old + clip), returns, huber_delta=huber_delta)
    loss = torch.maximum(free, held)
    return loss, slope.mul_(free.eq_(loss))
