"""The squared error of a critic, with PPO's clip or Huber's error as options."""

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.masking import check_above, check_tokens, zero_outside
from rlprims.types import CuSeqlens, PerToken, TokenMask, token_wise


@described
@token_wise
def value_loss(
    new_values: PerToken,
    values: PerToken,
    returns: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    *,
    clip: float | None = None,
    huber_delta: float | None = None,
) -> PerToken:
    """Squared error of the critic with the factor 1/2, optionally clipped as in PPO, or Huber's error.

    loss = h(V − R) with h(e) = ½ e². With ``clip=c`` (Dhariwal et al. 2017, baselines): max(h(V − R), h(V' − R)), where
    V' is V clamped to [V_old − c, V_old + c], with V_old the value at sampling time. TRL, OpenRLHF, verl and NeMo-RL
    have the factor ½; slime does not. With ``huber_delta=δ`` (Huber 1964): h(e) = δ (|e| − ½ δ) if |e| > δ, so that the
    gradient is at most δ; AReaL has it as an option, with δ = 10.

    Args:
        new_values: critic now; only it gets a gradient.
        values: critic at sampling time, V_old; used only with ``clip``.
        returns: the target, ``advantages + values`` before whitening.
        clip, huber_delta: c > 0 (verl: 0.5) and δ > 0, in units of the value, or None.

    >>> m = torch.ones(1, 1, dtype=torch.bool)
    >>> value_loss(torch.tensor([[3.0]]), torch.tensor([[0.0]]), torch.tensor([[2.0]]), m, clip=0.5)
    tensor([[1.1250]])
    """
    check_tokens(response_mask, cu_seqlens, new_values=new_values, values=values, returns=returns)
    check_above(0, ", or None for no clipping", clip=clip)
    check_above(0, ", or None for the squared error", huber_delta=huber_delta)

    new_values = zero_outside(new_values, response_mask)
    returns = zero_outside(returns, response_mask).detach()
    losses = _error(new_values - returns, huber_delta)
    if clip is not None:
        values = zero_outside(values, response_mask).detach()
        clipped_values = new_values.clamp(values - clip, values + clip)
        losses = torch.maximum(losses, _error(clipped_values - returns, huber_delta))
    return losses


def _error(e: Tensor, delta: float | None) -> Tensor:
    """½ e², or δ (|e| − ½ δ) if |e| > δ."""
    squares = e.square() / 2
    return squares if delta is None else torch.where(e.abs() > delta, delta * (e.abs() - delta / 2), squares)
